"""%gpu_logs, and the runs it finds."""

from __future__ import annotations

import os
import threading

import pytest

from gpu_launch.common import job_manifest, run_folder
from gpu_launch.errors import UsageError
from gpu_launch.output import logs


@pytest.fixture
def home(tmp_path):
    return tmp_path


def make(home, name, files=(), *, state=None):
    """A run's folder; files are (node folder, local rank, stream, text)."""
    run = run_folder.open_run(home, name)
    run.logs.mkdir(parents=True)
    for node, local, stream, text in files:
        place = run.logs / node / f"{name}_abc" / "attempt_0" / str(local)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{stream}.log").write_bytes(text.encode() if isinstance(text, str) else text)
    if state is not None:
        run.status.write_text(job_manifest.dump_json(state))
    return run


class Screen:
    def __init__(self):
        self.texts = []
        self.has = threading.Event()

    def __call__(self, stream, text):
        if text:
            self.texts.append((stream, text))
            self.has.set()

    def all(self, stream="stdout"):
        return "".join(text for name, text in self.texts if name == stream)


def show_logs(home, *words):
    screen = Screen()
    logs.show_logs(logs.parse_arguments(list(words)), home=home, write=screen)
    return screen


TWO_NODES = [
    ("node0", 0, "stdout", "a\nb\nc\n"),
    ("node0", 0, "stderr", ""),
    ("node0", 1, "stdout", "d\n"),
    ("node0", 1, "stderr", "bad\n"),
    ("node1", 0, "stdout", "e"),
    ("node1", 0, "stderr", b"\xff\n"),
]


def test_tail_of_every_rank_has_its_number(home):
    """Across nodes; a last line without its end too."""
    make(home, "run-20260101-000000-aaaaaa", TWO_NODES)
    screen = show_logs(home, "-n", "2")
    assert screen.all() == "[rank 0] b\n[rank 0] c\n[rank 1] d\n[rank 2] e\n"
    assert screen.all("stderr") == "[rank 1] bad\n[rank 2] \ufffd\n"


def test_one_rank_has_no_prefix(home):
    """And all of its lines where they are wanted."""
    make(home, "run-20260101-000000-aaaaaa", TWO_NODES)
    assert show_logs(home, "--rank", "0", "-n", "0").all() == "a\nb\nc\n"
    assert show_logs(home, "--rank=2").all() == "e\n"
    with pytest.raises(UsageError, match="has ranks 0 to 2"):
        show_logs(home, "--rank", "3")


def test_logs_are_of_the_latest_start(home):
    """After a restart the earlier one is in its own folder."""
    make(
        home, "run-20260101-000000-aaaaaa", [("node0", 0, "stdout", "old\n"), ("node0-restart1", 0, "stdout", "new\n")]
    )
    assert show_logs(home).all() == "[rank 0] new\n"


def test_a_detached_jobs_whole_output_is_one_file(home):
    """As it is shown on a laptop."""
    run = make(home, "run-20260101-000000-aaaaaa", TWO_NODES)
    run.output.write_text("one\ntwo\n")
    assert show_logs(home).all() == "one\ntwo\n"
    assert show_logs(home, "--rank", "1").all() == "d\n"


def test_many_lines_are_read_from_the_end(home, monkeypatch):
    """Whatever the size of a block."""
    text = "".join(f"line {number}\n" for number in range(1000))
    make(home, "run-20260101-000000-aaaaaa", [("node0", 0, "stdout", text)])
    for size in (7, 64, 1 << 20):
        monkeypatch.setattr(logs, "_CHUNK", size)
        assert show_logs(home, "--rank", "0", "-n", "3").all() == "line 997\nline 998\nline 999\n"
        assert show_logs(home, "--rank", "0", "-n", "0").all() == text


def test_follow_shows_new_output_until_the_run_ends(home):
    """New files too; then it returns by itself."""
    run = make(
        home,
        "run-20260101-000000-aaaaaa",
        [("node0", 0, "stdout", "begun\n")],
        state=job_manifest.JobStatus(state="running"),
    )
    screen = Screen()
    thread = threading.Thread(
        target=logs.show_logs, args=(logs.parse_arguments(["-f", "-n", "5"]),), kwargs={"home": home, "write": screen}
    )
    thread.start()
    assert screen.has.wait(10)
    place = next(run.logs.glob("node0/*/attempt_0/0"))
    with (place / "stdout.log").open("a") as opened:
        opened.write("more\nunend")
    (place / "stderr.log").write_text("late\n")
    run.status.write_text(job_manifest.dump_json(job_manifest.JobStatus(state="done")))
    thread.join(10)
    assert not thread.is_alive()
    assert screen.all() == "[rank 0] begun\n[rank 0] more\n[rank 0] unend\n"
    assert screen.all("stderr") == "[rank 0] late\n"


def test_follow_continues_through_a_preemption(home, monkeypatch):
    """It says that it was told to end; only the broker knows that it begins again."""
    monkeypatch.setattr(logs, "_REQUEUED_POLL_S", 0.01)
    run = make(
        home,
        "run-20260101-000000-aaaaaa",
        [("node0", 0, "stdout", "begun\n")],
        state=job_manifest.JobStatus(state="cancelled"),
    )
    asked = []

    def will_restart(run_id: str) -> bool:
        asked.append(run_id)
        return len(asked) < 3

    screen = Screen()
    logs.show_logs(logs.parse_arguments(["-f"]), home=home, write=screen, will_restart=will_restart)
    assert asked == [run.run_id] * 3
    assert screen.all() == "[rank 0] begun\n"


def test_follow_of_a_notebooks_launch_ends_with_its_heartbeat(home):
    """It tells no state; its sign of life goes at its end."""
    run = make(home, "run-20260101-000000-aaaaaa", [("node0", 0, "stdout", "begun\n")])
    run.heartbeat.touch()
    assert not logs.is_over(run)
    run.heartbeat.unlink()
    assert logs.is_over(run)
    assert show_logs(home, "-f").all() == "[rank 0] begun\n"


def test_run_without_output_shows_its_state(home):
    """With what it does at present."""
    state = job_manifest.JobStatus(state="starting", text="waits for 2 GPUs")
    run = make(home, "run-20260101-000000-aaaaaa", state=state)
    assert show_logs(home).all() == f"{run.run_id} has no output (waits for 2 GPUs)\n"


def test_runs_are_found_by_any_unique_part_of_the_id(home):
    """The last one for no name."""
    for stamp, tail in (("20260101-000000", "aaaaaa"), ("20260102-000000", "bbbbbb"), ("20260102-000000", "caaaaa")):
        make(home, f"run-{stamp}-{tail}", [("node0", 0, "stdout", "")])
    # Folders of workers alone are no runs.
    run_folder.open_run(home, "run-20270101-000000-dddddd").logs.mkdir(parents=True)
    os.utime(run_folder.open_run(home, "run-20260102-000000-bbbbbb").logs, ns=(0, 2**62))
    assert logs.find_run(home, "").run_id == "run-20260102-000000-bbbbbb"
    assert logs.find_run(home, "bbbbbb").run_id == "run-20260102-000000-bbbbbb"
    assert logs.find_run(home, "run-20260101").run_id == "run-20260101-000000-aaaaaa"
    with pytest.raises(UsageError, match=r"matches several runs: "):
        logs.find_run(home, "aaaaa")
    with pytest.raises(UsageError, match=r"There is no run zzz\. The latest are run-20260102-000000-bbbbbb"):
        logs.find_run(home, "zzz")
    assert len(logs.list_runs(home, most=2)) == 2
    assert f"{logs.parse_start_time(logs.find_run(home, 'bbbbbb')):%d %b}" == "02 Jan"


@pytest.mark.parametrize("name", ["..", "../..", "a/b", "run-20260101-000000-aaaaaa/logs"])
def test_run_name_cannot_escape_the_runs_folder(home, name):
    """Only names of folders that are there count."""
    make(home, "run-20260101-000000-aaaaaa", TWO_NODES)
    with pytest.raises(UsageError):
        logs.find_run(home, name)


def test_tail_is_the_end_of_all_ranks_output_within_a_size(home):
    """Each rank has its part of the bytes, from the begin of a line; a long line without an end is cut."""
    lines = "".join(f"step {step}\n" for step in range(1000))
    run = make(home, "run-20260101-000000-a", [("node0", 0, "stdout", lines), ("node1", 0, "stdout", "x" * 5000)])
    text = logs.read_tail(run, most_bytes=200)
    first, *_, last, cut = text.splitlines()
    assert first.startswith("[rank 0] step 98")
    assert last == "[rank 0] step 999"
    assert cut == "[rank 1] " + "x" * 100


def test_tail_of_a_detached_job_is_its_journal(home):
    """A run without output has none, also if its folder is not there yet."""
    run = make(home, "run-20260101-000000-a", [("node0", 0, "stdout", "from a rank\n")])
    run.output.write_bytes("é\n".encode() + b"\xff\n")
    assert logs.read_tail(run, most_bytes=100) == "é\n�\n"
    assert logs.read_tail(run_folder.open_run(home, "run-20260101-000000-b"), most_bytes=100) == ""
