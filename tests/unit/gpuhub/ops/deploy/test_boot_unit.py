"""The systemd unit that starts an instance at boot."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.ops.deploy import boot_unit
from gpuhub.ops.deploy.boot_unit import BootUnit

SOURCE = Path("/srv/100% of $HOME/gpuhub")


@pytest.fixture
def unit(tmp_path: Path) -> BootUnit:
    """Return the unit of an instance in a folder whose name systemd would expand."""
    paths = Paths(instance="ghboot")
    return BootUnit(paths=paths, source=SOURCE, cluster_file=SOURCE / "cluster.toml", units=tmp_path)


@pytest.mark.process
def test_systemd_accepts_the_unit(unit: BootUnit, tmp_path: Path) -> None:
    """systemd's own check reads it without a complaint, but for programs and folders that are not there."""
    program = shutil.which("systemd-analyze")
    assert program, "systemd-analyze is missing: apt-get install systemd"
    there = replace(unit, source=tmp_path)
    there.file.write_text(there.build(), encoding="utf-8")
    done = subprocess.run([program, "verify", "--man=no", str(there.file)], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if "ghboot" in line and "is not executable" not in line]
    assert complaints == []


def test_paths_are_not_expanded(unit: BootUnit) -> None:
    """A percent sign is a specifier in units, and a dollar sign a variable in commands."""
    lines = unit.build().splitlines()
    assert "WorkingDirectory=/srv/100%% of $HOME/gpuhub" in lines
    (command,) = [line for line in lines if line.startswith("ExecStart=")]
    assert command.endswith("up --instance ghboot --cluster-file '/srv/100%% of $$HOME/gpuhub/cluster.toml'")


def test_install_enables_the_unit_and_uninstall_removes_it(unit: BootUnit, tmp_path: Path) -> None:
    """Again and again; a file that somebody changed is written again."""
    calls: list[Sequence[str]] = []
    assert unit.install(calls.append, booted=tmp_path)
    assert unit.file.stat().st_mode & 0o777 == 0o644
    assert not unit.install(calls.append, booted=tmp_path)
    unit.file.write_text("[Unit]\n", encoding="utf-8")
    assert unit.install(calls.append, booted=tmp_path)
    assert calls == [["daemon-reload"], ["enable", "ghboot.service"]] * 3
    calls.clear()
    assert unit.uninstall(calls.append, booted=tmp_path)
    assert not unit.file.exists()
    assert not unit.uninstall(calls.append, booted=tmp_path)
    assert calls == [["disable", "ghboot.service"], ["daemon-reload"]]


def test_a_machine_without_systemd_is_told_what_to_do(unit: BootUnit, tmp_path: Path) -> None:
    """Nothing is written."""
    for action in (unit.install, unit.uninstall):
        with pytest.raises(SetupError, match=r"systemd does not run this machine .*missing"):
            action(lambda words: None, booted=tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_a_refusal_of_systemctl_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With its own words."""
    fake = tmp_path / "systemctl"
    fake.write_text("#!/bin/sh\necho 'Failed to enable unit: File exists' >&2\nexit 1\n", encoding="ascii")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SetupError, match=r"systemctl enable x\.service: Failed to enable unit: File exists"):
        boot_unit.run_systemctl(["enable", "x.service"])
