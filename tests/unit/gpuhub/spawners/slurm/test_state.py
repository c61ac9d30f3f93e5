"""What a hub knows of a job whose start an earlier hub did not finish."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuhub.common.errors import InvalidRequest
from gpuhub.spawners.slurm.job_spawner import JobRecord, JobRecordStore


def test_a_record_is_roots_alone_and_goes(tmp_path: Path) -> None:
    records = JobRecordStore(tmp_path / "jobs")
    assert records.find("l1") is None
    records.save("l1", JobRecord(token="t"))
    records.save("l1", JobRecord(token="t", job=7, port=40000))
    assert records.find("l1") == JobRecord(token="t", job=7, port=40000)
    assert (tmp_path / "jobs").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "jobs" / "l1.json").stat().st_mode & 0o777 == 0o600
    assert records.find("l2") is None
    records.delete("l1")
    records.delete("l1")
    assert list((tmp_path / "jobs").iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job": 1}', '{"token": "t", "more": 1}'])
def test_half_a_record_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "l1.json").write_text(text)
    assert JobRecordStore(tmp_path).find("l1") is None


@pytest.mark.parametrize("lease", ["../l1", "", "a/b", "l1\n", ".hidden"])
def test_a_lease_is_no_path(lease: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        JobRecordStore(tmp_path).find(lease)
