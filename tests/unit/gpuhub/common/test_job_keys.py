"""Keys of jobs."""

from __future__ import annotations

import pytest

from gpuhub.common.job_keys import build_key, find_job_id


def test_a_key_names_its_job() -> None:
    """Only with the secret that made it."""
    key = build_key("secret", "job-7")
    assert find_job_id("secret", key) == "job-7"
    assert find_job_id("another", key) is None
    assert "secret" not in key


@pytest.mark.parametrize("key", ["", ".", "job-7", "job-7.", "job-7.ü", "job-8.{code}", "{code}", "job-7.{code}0"])
def test_anything_else_is_nobodys(key: str) -> None:
    """Another job's id, a part of a key, and texts of any kind."""
    code = build_key("secret", "job-7").partition(".")[2]
    assert find_job_id("secret", key.format(code=code)) is None
