"""The Epilog's output and exit status when it cannot remove containers; the closet's tests cover removal."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from gpuhub_closet.slurm.slurm_setup import EPILOG

pytestmark = pytest.mark.process


def run(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it as slurmd does, with no Docker daemon at all."""
    own = {"DOCKER_HOST": f"unix://{tmp_path}/none.sock", "GPUHUB_EPILOG_WAIT": "0", **environment}
    return subprocess.run([EPILOG], env=own, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("job", ["", "12; reboot", "$(reboot)", "-1", "12 13", "１２"])
def test_epilog_refuses_a_job_id_that_is_not_a_number(tmp_path, job):
    """Only slurmd runs it, with a job's number."""
    done = run(tmp_path, SLURM_JOB_ID=job)
    assert done.returncode == 1
    assert "SLURM_JOB_ID is not a number" in done.stderr


def test_epilog_fails_when_docker_does_not_respond(tmp_path):
    """It fails, so that Slurm does not grant the GPUs: containers that it could not list may still run."""
    done = run(tmp_path, SLURM_JOB_ID="12")
    assert done.returncode == 1
    assert "containers of job 12 may still run" in done.stderr
    assert "none.sock" in done.stderr


def test_epilog_is_an_executable_script():
    """slurmd runs the file itself."""
    assert EPILOG.read_text().startswith("#!/bin/sh\n")
    assert EPILOG.stat().st_mode & stat.S_IXUSR
