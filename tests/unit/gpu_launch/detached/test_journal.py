"""A detached job's folder: what lies in it before, what the job writes, and how long it stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu_launch.common import job_manifest, run_folder
from gpu_launch.courier import files
from gpu_launch.courier.files import MAX_STATUS
from gpu_launch.detached import job_files
from gpu_launch.detached.journal import Journal, JournalScreen
from gpu_launch.errors import LaunchFailed, UsageError
from gpu_launch.output.panel import PanelView
from gpu_launch.output.progress_bars import ProgressBar

MANIFEST = job_manifest.JobManifest(
    name="train.py", words=("--nnodes=2", "--", "train.py", "--lr", "0.1"), environ={"X": "ü"}
)


@pytest.fixture
def run(tmp_path: Path) -> run_folder.RunFolder:
    """A job's folder."""
    root = tmp_path / "run-20260101-000000-aaaaaa"
    root.mkdir()
    return run_folder.RunFolder(root=root)


def test_manifest_does_not_depend_on_the_home():
    """The order comes back as it was, and workers are told that the job leads itself."""
    files = job_files.build_files(MANIFEST)
    assert sorted(files) == ["job.json", "run.json"]
    assert job_manifest.parse_manifest(files["job.json"].decode()) == MANIFEST
    assert json.loads(files["run.json"])["detached"] is True
    assert str(Path.home()).encode() not in b"".join(files.values())


@pytest.mark.process
def test_a_laptop_needs_neither_torch_nor_ipyparallel():
    """Only what is pure is imported with the folder."""
    code = (
        "import sys; from gpu_launch.detached import job_files;"
        "print([name for name in ('torch', 'zmq', 'ipyparallel', 'psutil', 'IPython') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("", "not JSON"),
        ("[]", "a list, not an object"),
        ('{"name": "x", "version": 2}', "install the gpu-launch that the cluster has"),
        ('{"version": 1}', "not complete"),
        ('{"name": "x", "version": 1, "task": {"run": "a", "more": 1}}', "not complete"),
    ],
)
def test_invalid_manifest_is_refused(text, right):
    """By name of what is wrong."""
    with pytest.raises(UsageError, match=right):
        job_manifest.parse_manifest(text)


def test_restart_of_a_preempted_job_uses_new_control_files(run):
    """What an earlier start left cannot be taken for the present one's."""
    later = run_folder.RunFolder(root=run.root, earlier_starts=2)
    assert (run.connection.name, later.connection.name) == ("engine.json", "engine-2.json")
    assert run.profile != later.profile
    assert (run.output, run.status, run.logs) == (later.output, later.status, later.logs)


def test_output_and_state_continue_after_a_restart(run):
    """One output for all starts; the state of the last one is handed over."""
    first = Journal(run)
    assert first.open() is None
    first.write("one\n")
    first.update(state="running", attempt=2, started_at=5.0)
    first.close("two\n", state="cancelled", exit_code=143, ended_at=6.0)
    second = Journal(run)
    earlier = second.open()
    assert earlier is not None and (earlier.state, earlier.attempt, earlier.started_at) == ("cancelled", 2, 5.0)
    second.write("three \udcff\n")
    second.close("", state="done")
    assert run.output.read_text() == "one\ntwo\nthree \\udcff\n"
    assert job_manifest.parse_status(run.status.read_text()).exit_code == 143
    assert [path.name for path in run.root.iterdir() if path.name.startswith(".")] == []
    assert {path.stat().st_mode & 0o777 for path in (run.output, run.status)} == {0o600}


def test_only_changes_of_the_state_are_written(run):
    """A text that changes all the time does not keep the disk at work; everything else is there at once."""
    journal = Journal(run)
    journal.open()
    screen = JournalScreen(journal, lambda: {"state": "running", "attempt": 0})
    screen.show_panel(PanelView(bars=(ProgressBar(step=5, total=10),)))
    screen.show_progress("running on rig1")
    told = job_manifest.parse_status(run.status.read_text())
    assert told.state == "running" and told.text.startswith("running on rig1") and "5" in told.text
    before = run.status.stat().st_ino
    for number in range(100):
        screen.show_progress(f"step {number}")
    assert run.status.stat().st_ino == before
    journal.update(attempt=1)
    told = job_manifest.parse_status(run.status.read_text())
    assert told.attempt == 1 and told.text.startswith("step 99")


@pytest.mark.parametrize("character", ["x", "\0", "\U0001f600"])
def test_status_is_below_the_limit_of_the_courier(run, character):
    """A traceback of any length: its begin and its end are kept, and the output has all of it."""
    error = f"first {character * MAX_STATUS} last"
    journal = Journal(run)
    journal.open()
    journal.close(error, state="failed", error=error, text=character * MAX_STATUS)
    found = job_manifest.parse_status(files.read_state(run.root).decode())
    assert found.error.startswith("first ") and found.error.endswith(" last")
    assert "characters are left out; output.log has them" in found.error
    assert run.output.read_text() == error


def test_full_disk_is_reported_once(run):
    """Then nothing more is tried until the last words."""
    run.output.symlink_to("/dev/full")
    journal = Journal(run)
    journal.open()
    with pytest.raises(LaunchFailed, match=r"output\.log of this job cannot be written in .*: No space left on device"):
        journal.write("text")
    journal.write("more")
    journal.update(state="running")
    assert not run.status.exists()
    journal.close("words", state="failed", error="full")
    assert job_manifest.parse_status(run.status.read_text()).error == "full"


def make(jobs: Path, number: int, *names: str, state: str = "", days: float = 0) -> run_folder.RunFolder:
    """A run's folder with some files, `days` old."""
    made = run_folder.RunFolder(root=jobs / f"run-20200101-{number:06}-aaaaaa")
    made.root.mkdir(parents=True)
    if state:
        made.status.write_text(job_manifest.dump_json(job_manifest.JobStatus(state=state)))
    for path in [made.root / name for name in names] + ([made.status] if state else []):
        path.touch()
        os.utime(path, (time.time() - days * 86400,) * 2)
    return made


def test_waiting_and_running_jobs_are_never_pruned(tmp_path):
    """Whoever makes room: a job may wait for weeks while its owner launches many times a day."""
    stay = [
        make(tmp_path, 0, "job.json", days=20),
        make(tmp_path, 1, "job.json", state="running"),
        make(tmp_path, 2, "job.json", state="cancelled", days=10),
        make(tmp_path, 3, "lives"),
        make(tmp_path, 4, "engine-3.json"),
        make(tmp_path, 5, "job.json", state="starting"),
    ]
    go = [
        make(tmp_path, 10),
        make(tmp_path, 11, "job.json", state="done"),
        make(tmp_path, 12, "job.json", state="failed"),
        make(tmp_path, 13, "job.json", state="running", days=20),
        make(tmp_path, 14, "job.json", days=100),
        make(tmp_path, 15, "lives", "engine.json", days=20),
    ]
    run_folder.prune_runs(tmp_path, keep=0)
    assert all(run.root.exists() for run in stay)
    assert not any(run.root.exists() for run in go)


def test_latest_finished_runs_are_kept(tmp_path):
    """Those that live do not take their places."""
    made = [make(tmp_path, number, *(("lives",) if number % 2 else ())) for number in range(20)]
    run_folder.prune_runs(tmp_path, keep=3)
    left = [number for number, run in enumerate(made) if run.root.exists()]
    assert left == sorted([*range(1, 20, 2), 14, 16, 18])
