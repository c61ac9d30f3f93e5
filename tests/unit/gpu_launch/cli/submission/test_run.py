"""`gpu-launch run`, `attach` and `logs` against a hub over real HTTP."""

from __future__ import annotations

import _thread
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_launch.cli import follow, main
from gpu_launch.common import job_manifest
from gpuhub.broker.admission.submit import split_array
from gpuhub.broker_api import schemas
from tests.support.hub.fake_hub import TOKEN, USER, FakeHub, served


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub whose one user's home is a folder."""
    home = tmp_path / "home"
    home.mkdir()
    with served(FakeHub(home=home)) as found:
        yield found


@pytest.fixture
def project(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a laptop that is logged in."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("GPUHUB_URL", hub.url)
    monkeypatch.setenv("GPUHUB_TOKEN", TOKEN)
    return folder


@pytest.fixture
def in_thread() -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    """Runs what a cluster does meanwhile; its errors fail the test."""
    threads: list[threading.Thread] = []
    errors: list[Exception] = []

    def start(act: Callable[[], object]) -> threading.Thread:
        def guarded() -> None:
            try:
                act()
            except Exception as error:  # noqa: BLE001 - shown when the test ends
                errors.append(error)
                # The command that is tried waits for what does not come any more: a Ctrl-C ends it.
                _thread.interrupt_main()

        thread = threading.Thread(target=guarded)
        thread.start()
        threads.append(thread)
        return thread

    yield start
    for thread in threads:
        thread.join(20)
    assert errors == []


def wait_until(condition: Callable[[], object], *, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def list_job_polls(hub: FakeHub) -> list[str]:
    """Questions about the job."""
    return [line for line in hub.requests if line.startswith("GET /jobs/job-") and line.count("/") == 2]


def test_run_returns_the_scripts_exit_status(
    hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str], in_thread: Callable
) -> None:
    """The folder is sent, the job waits with its place, its output comes to stdout, its exit status is passed on."""

    def cluster() -> None:
        wait_until(lambda: hub.asked)
        wait_until(lambda: len(list_job_polls(hub)) >= 2)
        hub.run()
        before = len(list_job_polls(hub))
        wait_until(lambda: len(list_job_polls(hub)) > before)
        hub.write("step 1 ä\n")
        hub.write("step 2\n")
        hub.end(3)

    in_thread(cluster)
    status = main.run_command(["run", "--nnodes", "2", "-e", "LR=0.1", "train.py", "--epochs", "2"])
    shown = capsys.readouterr()
    assert (status, shown.out) == (3, "step 1 ä\nstep 2\n")
    assert "waiting for GPUs: position 2; waits for 1 × any GPU: held by ben" in shown.err
    assert "running on rig1 RTX 5090" in shown.err
    assert "gpu-launch: GPU 31 % busy, 9.0 of 32 GB, 0.42 kWh; an RTX 5060 would have been enough\n" in shown.err
    assert shown.err.endswith("ended with exit status 3.\n")
    (asked,) = hub.asked
    assert (asked["nnodes"], asked["detached"], asked["name"]) == (2, True, "train.py")
    assert "batch" not in asked
    ordered = job_manifest.parse_manifest((hub.home / ".gpu_launch/jobs" / asked["run_id"] / "job.json").read_text())
    assert ordered.words == ("--nnodes=2", "--nproc-per-node=1", "--", "train.py", "--epochs", "2")
    assert ordered.environ == {"LR": "0.1"}
    assert ordered.folder.startswith("gpu-launch/train-")
    assert (hub.home / ordered.folder / "train.py").read_text() == "print('hello')\n"
    assert (hub.home / ".gpu_launch/jobs" / asked["run_id"] / "run.json").stat().st_mode & 0o777 == 0o600


def test_detached_prints_only_the_run_id(hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts: the id on stdout, with --json one document; it is a batch job."""
    assert main.run_command(["run", "-d", "train.py"]) == 0
    assert capsys.readouterr().out == f"{hub.asked[0]['run_id']}\n"
    assert hub.asked[0]["batch"] is True
    assert main.run_command(["run", "--detach", "--json", "--name", "second", "train.py"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run_id"], told["name"], told["state"]) == (hub.asked[1]["run_id"], "second", "waiting")


def test_json_prints_only_the_job_to_stdout(
    hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str], in_thread: Callable
) -> None:
    """Output goes to stderr, the ended job to stdout."""

    def cluster() -> None:
        wait_until(lambda: hub.asked)
        hub.run()
        hub.write("loss 1\n")
        hub.end(0)

    in_thread(cluster)
    assert main.run_command(["run", "--json", "train.py"]) == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert (told["state"], told["exit_code"], told["nodes"]) == ("done", 0, ["rig1"])
    assert "loss 1\n" in shown.err


@pytest.mark.parametrize(
    ("gpus", "held", "shape"),
    [
        (1, {}, (1, 1)),
        (2, {}, (1, 2)),
        (2, {"GPU-rig1-0": "ben"}, (2, 1)),
        (3, {"GPU-rig1-0": "ben", "GPU-rig1-1": "ben"}, (3, 1)),
    ],
)
def test_gpu_count_is_converted_to_nodes_and_gpus_per_node(
    hub: FakeHub, project: Path, gpus: int, held: dict[str, str], shape: tuple[int, int]
) -> None:
    """As few nodes as are free now."""
    hub.held = held
    assert main.run_command(["run", "-d", "--gpus", str(gpus), "train.py"]) == 0
    assert (hub.asked[0]["nnodes"], hub.asked[0]["nproc_per_node"]) == shape


def test_output_survives_outages_and_broken_streams(
    hub: FakeHub,
    project: Path,
    capsys: pytest.CaptureFixture[str],
    in_thread: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was shown is not shown again, nothing is missing, and the outage is told once."""
    monkeypatch.setattr(follow, "_RETRY_S", 0.05)
    hub.breaks_after = 1000

    def cluster() -> None:
        wait_until(lambda: hub.asked)
        hub.run()
        for number in range(300):
            hub.write(f"line {number:04}\n")
            if number == 100:
                hub.outage = 503
                time.sleep(1.2)
                hub.outage = None
        hub.end(0)

    in_thread(cluster)
    assert main.run_command(["run", "train.py"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "".join(f"line {number:04}\n" for number in range(300))
    assert 1 <= shown.err.count("does not answer; trying again") <= 2


def test_logs_show_whole_output_tail_or_one_rank(
    hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole, a tail, and one rank's; by the job's name or the end of its run's id."""
    hub.add("run-20260101-000000-abc123", name="train")
    hub.write("a\nb\nc\n")
    (hub.home / ".gpu_launch/jobs/run-20260101-000000-abc123/rank-1.log").write_text("one\n")
    for words, text in (
        (["logs", "train"], "a\nb\nc\n"),
        (["logs", "--tail", "2", "abc"], "b\nc\n"),
        (["logs", "--tail", "0", "abc"], ""),
        (["logs", "--rank", "1", "run-2026"], "one\n"),
    ):
        assert main.run_command(words) == 0
        assert capsys.readouterr().out == text
    assert main.run_command(["logs", "--json", "--tail", "1", "train"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "run": "run-20260101-000000-abc123",
        "state": "waiting",
        "output": "c\n",
    }
    assert main.run_command(["logs", "--json", "--follow", "train"]) == 2
    assert "without --follow" in json.loads(capsys.readouterr().err)["error"]


def test_attach_follows_to_the_end(
    hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str], in_thread: Callable
) -> None:
    """The last lines, what comes, and the job's exit status."""
    hub.add("run-20260101-000000-abc123", name="train")
    hub.run()
    hub.write("".join(f"{number}\n" for number in range(100)))

    def cluster() -> None:
        wait_until(lambda: sum(line.endswith("/logs") for line in hub.requests) >= 2)
        hub.write("last\n")
        hub.end(139)

    in_thread(cluster)
    assert main.run_command(["attach", "train"]) == 139
    assert capsys.readouterr().out == "".join(f"{number}\n" for number in range(80, 100)) + "last\n"


def _start(words: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gpu_launch.cli.main", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.process
def test_an_interrupted_run_is_cancelled(hub: FakeHub, project: Path) -> None:
    """Ctrl-C ends what `run` started, and says so."""
    with _start(["run", "train.py"], project) as command:
        wait_until(lambda: hub.asked)
        hub.run()
        hub.write("begun\n")
        assert command.stdout is not None
        assert command.stdout.readline() == "begun\n"
        command.send_signal(signal.SIGINT)
        assert command.wait(20) == 130
        assert command.stderr is not None
        assert f"cancelling {hub.asked[0]['run_id']}" in command.stderr.read()
    assert hub.job()["state"] == "ended"


@pytest.mark.process
@pytest.mark.parametrize("words", [["attach", "train"], ["logs", "-f", "train"]])
def test_an_interrupted_attach_leaves_the_job(hub: FakeHub, project: Path, words: list[str]) -> None:
    """Ctrl-C only detaches."""
    hub.add("run-20260101-000000-abc123", name="train")
    hub.run()
    hub.write("begun\n")
    with _start(words, project) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "begun\n"
        wait_until(lambda: sum(line.endswith("/logs") for line in hub.requests) >= 1)
        command.send_signal(signal.SIGINT)
        assert command.wait(20) == 130
    assert hub.job()["state"] == "running"


@pytest.mark.process
@pytest.mark.parametrize(
    ("thread", "output"),
    [("", "the last line\npython has ended\n"), ("threading.Event().wait", "the last line\n")],
    ids=["alone", "with a thread"],
)
def test_a_process_with_a_waiting_thread_ends_at_once(thread: str, output: str) -> None:
    """With its status and all its output; Python's own end crashed at times when the thread woke meanwhile."""
    program = f"""
import atexit, threading
from gpu_launch.cli import main
atexit.register(print, "python has ended")
if {thread or None}:
    threading.Thread(target={thread or None}, daemon=True).start()
print("the last line")
main.end_process(130)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (130, output), done.stderr


def test_a_job_that_the_broker_ended_fails_with_its_reason(
    hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str], in_thread: Callable
) -> None:
    """No exit status of its own: 1, and why."""

    def cluster() -> None:
        wait_until(lambda: hub.asked)
        hub.end(None, reason="its time limit is over")

    in_thread(cluster)
    assert main.run_command(["run", "train.py"]) == 1
    assert "ended without an exit status: its time limit is over." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["run", "trai.py"], "There is no script trai.py in"),
        (["run", "--gpus", "9", "train.py"], "--gpus 9: the cluster has 4 GPUs in total"),
        (["run", "--gpus", "2", "--nnodes", "2", "train.py"], "--gpus replaces"),
        (["run", "--model", "A100", "train.py"], "--model A100: the cluster has RTX 5070, RTX 5090"),
        (
            ["run", "--nnodes", "4", "train.py"],
            "1 GPU on each of 4 nodes is more than the cluster has: rig1, rig2, rig3",
        ),
        (["run", "--nproc-per-node", "3", "train.py"], "3 GPUs is more than any node of the cluster has"),
        (["run", "--memory", "24", "train.py"], "--memory 24: a size with its unit is needed"),
        (["run", "-e", "1X=2", "train.py"], "--env 1X: a variable's name is needed"),
        (["run", "-e", "NOT_SET_ANYWHERE", "train.py"], "--env NOT_SET_ANYWHERE: it is not set here"),
        (["run", "--max-size", "1M", "big/.."], "is a folder; name the script in it"),
        (["run", "--workdir", "x", "--no-workdir", "train.py"], "--workdir and --no-workdir exclude each other"),
        (["run", "--array", "0-9%0", "train.py"], "after %, the number of tasks that may run at once is needed"),
        (["run", "--array", "0-9%", "train.py"], "after %, the number of tasks that may run at once is needed"),
        (["run", "--retry", "101", "train.py"], "--retry 101: a whole number from 0 to 100 is needed"),
        (["run", "--after", "other", "train.py"], "There is no job other"),
        (["run", "--array", "9-0", "train.py"], "indexes such as 0-9, 0-100:10 or 1,3,5 are needed"),
        (["run", "--array", "0-9:0", "train.py"], "indexes such as 0-9"),
        (["run", "--array", "", "train.py"], "indexes such as 0-9"),
        (["run", "--array", "0-1000", "train.py"], "1001 tasks are more than one array may have, 1000"),
        (["run", "--array", "0-1", "--nnodes", "1:3", "train.py"], "--array and --nnodes MIN:MAX exclude each other"),
        (["run", "--array", "0-1", "--nnodes", "2", "train.py"], "--array and --nnodes 2 exclude each other"),
        (["run", "--array", "0-1", "--nproc-per-node", "2", "train.py"], "--array and --nproc-per-node 2 exclude"),
        (["run", "--array", "0-1", "--gpus", "2", "train.py"], "--array and --gpus exclude each other"),
        (["run", "--port", "0", "train.py"], "'--port': 0 is not in the range 1<=x<=65535"),
        (["run", "--allow-user", "ben", "train.py"], "--allow-user is for a job with a port: add --port"),
        (["run", "--sleep", "train.py"], "--sleep is for a job with a port, whose requests wake it: add --port"),
        (["run", "--port", "80", "--allow-user", "Ben X", "train.py"], "--allow-user Ben X: a user's name on the hub"),
        (["run", "--port", "80", "--array", "0-1", "train.py"], "--array and --port exclude each other"),
        (["run", "--name", "a\nb", "train.py"], "--name: a name of 1 to 80 printable characters is needed"),
        (["run", "--master-port", "1", "train.py"], "No such option '--master-port'"),
        (["logs", "nothing"], "There is no job nothing."),
        (["cancel"], "Name the runs to end, or --all."),
        (["cp", "a", "b"], "One of SRC and DST must be on the cluster"),
        (["cp", "home:/etc/passwd", "."], "leave out the first /"),
        (["cp", "home:../x", "."], "cannot have .. in it"),
    ],
)
def test_invalid_command_lines_send_no_request(
    hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    """One line on stderr, exit status 2, nothing sent and nothing asked."""
    (project / "big").mkdir()
    assert main.run_command(words) == 2
    shown = capsys.readouterr()
    assert text in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert hub.asked == []
    assert not any(line.startswith("PUT") for line in hub.requests)


def test_waiting_job_names_what_the_user_holds(hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At once, with the command that frees it."""
    hub.add("run-a", name="%gpu_ranks", detached=False)
    hub.run("run-a")
    gpu = {"uuid": "GPU-1", "node": "rig2", "model": "RTX 5070", "memory_mib": 12_227}
    hub.leases.append({"owner": USER, "purpose": "notebook", "subject": "second", "state": "active", "gpus": [gpu]})
    assert main.run_command(["run", "-d", "train.py"]) == 0
    assert (
        "gpu-launch: you hold GPUs yourself that this request could use:\n"
        "gpu-launch:   notebook 'second' (rig2 RTX 5070): stop it on the hub's Home page\n"
        "gpu-launch:   %gpu_ranks run-a (rig1 RTX 5090): %gpu_ranks --stop in its notebook, or gpu-launch cancel run-a\n"
    ) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "is_json"),
    [
        (["run", "--json", "nosuch.py"], True),
        (["--json", "run", "nosuch.py"], True),
        (["run", "nosuch.py", "--json"], False),
        (["run", "--json", "--nosuch", "train.py"], True),
        (["run", "--nosuch", "train.py", "--json"], False),
        (["run", "--nnodes", "x", "train.py", "--json"], False),
        (["ps", "--nosuch", "--json"], True),
        (["shell", "nosuch", "--", "--json"], False),
        (["--json", "nosuch"], True),
    ],
)
def test_errors_are_json_by_gpu_launchs_own_option(
    hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str], words: list[str], *, is_json: bool
) -> None:
    """Before or after the command's name; a script's own `--json` is the script's."""
    assert main.run_command(words) == 2
    assert capsys.readouterr().err.startswith('{"error": "' if is_json else "gpu-launch: ")


def test_json_before_the_command_counts_for_it(hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As after it."""
    assert main.run_command(["--json", "ps"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_refused_job_sends_nothing(hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The broker checks it before the upload; what it refuses only afterwards is named with its folder."""
    hub.check_refusal = "there is no profile 'nosuch'; there are: torch"
    for words in ([], ["--dry-run"], ["--array", "0-2"]):
        assert main.run_command(["run", "-d", "--profile", "nosuch", *words, "train.py"]) == 1
        assert capsys.readouterr().err == "gpu-launch: there is no profile 'nosuch'; there are: torch\n"
    assert not any(line.startswith("PUT") for line in hub.requests)
    hub.check_refusal, hub.job_refusals = "", {"train.py": "one user may hold at most 1"}
    assert main.run_command(["run", "-d", "train.py"]) == 1
    [folder] = (hub.home / "gpu-launch").iterdir()
    assert f"the files that were sent are in ~/gpu-launch/{folder.name}\n" in capsys.readouterr().err


def test_error_leads_to_the_hubs_page_about_it(hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a line of its own, and in the JSON."""
    hub.check_refusal, hub.refusal_code = "ada has 16 waiting requests; the limit is 16", "too-many-waiting"
    page = f"{hub.url}/hub/gpuhub/troubleshooting#too-many-waiting"
    assert main.run_command(["run", "-d", "train.py"]) == 1
    assert capsys.readouterr().err == f"gpu-launch: {hub.check_refusal}\nMore: {page}\n"
    assert main.run_command(["run", "-d", "--json", "train.py"]) == 1
    assert json.loads(capsys.readouterr().err) == {"error": hub.check_refusal, "more": page}


def test_broker_of_an_earlier_version_checks_nothing(hub: FakeHub, project: Path) -> None:
    """It refuses the request itself."""
    hub.checks_jobs = False
    assert main.run_command(["run", "-d", "train.py"]) == 0


def test_dry_run_sends_no_request(hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What would be sent and asked for."""
    assert main.run_command(["run", "--dry-run", "--gpus", "2", "train.py"]) == 0
    assert "1 file, 15 B" in (text := capsys.readouterr().out)
    assert "2 GPUs on each of 1 node" in text
    assert main.run_command(["run", "--dry-run", "--json", "-e", "A=hidden", "--secret", "B=hidden", "train.py"]) == 0
    told = json.loads(text := capsys.readouterr().out)
    assert (told["files"], told["nnodes"], told["environ"]) == (["train.py"], 1, ["A", "B"])
    assert told["secrets"] == ["B"]
    assert "hidden" not in text
    assert main.run_command(["run", "--dry-run", "-e", "A=hidden", "--secret", "B=hidden", "train.py"]) == 0
    assert "with:       A, B (secret)\n" in capsys.readouterr().out
    assert hub.asked == []


def test_secrets_of_a_task_file_are_known_as_such(
    hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However their values are given."""
    (project / "task.yaml").write_text("envs: {A: a, B: b}\nsecrets: {C: null, D: d}\nrun: ./train\n")
    words = ["run", "--dry-run", "--json", "-e", "C=c", "--secret", "A=a", "task.yaml"]
    assert main.run_command(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["environ"], told["secrets"]) == (["A", "B", "C", "D"], ["A", "C", "D"])


def test_an_array_has_a_task_for_each_index(hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One request; each task's folder has its own index, and ps and cancel know the tasks."""
    assert main.run_command(["run", "--array", "0-20:10,5", "-e", "LR=0.1", "train.py", "--epochs", "2"]) == 0
    (asked,) = hub.asked
    array = asked["job"]["run_id"]
    assert (asked["count"], asked["job"]["detached"], asked["job"]["batch"]) == (4, True, True)
    # The broker's own schema and its own numbering of the tasks.
    tasks = split_array(schemas.ArrayRequest.model_validate(asked))
    assert [task.run_id for task in tasks] == [f"{array}-{number}" for number in range(4)]
    shown = capsys.readouterr()
    assert shown.out == f"{array}\n"
    assert f"4 tasks, {array}-0 to {array}-3" in shown.err
    manifests = [
        job_manifest.parse_manifest((hub.home / f".gpu_launch/jobs/{array}-{number}/job.json").read_text())
        for number in range(4)
    ]
    assert [manifest.environ for manifest in manifests] == [
        {"LR": "0.1", "GPU_LAUNCH_ARRAY_INDEX": index} for index in ("0", "10", "20", "5")
    ]
    assert {manifest.words[-3:] for manifest in manifests} == {("train.py", "--epochs", "2")}
    assert len({manifest.folder for manifest in manifests}) == 1
    assert main.run_command(["ps", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {(job["run_id"], job["array"]) for job in told} == {(f"{array}-{number}", array) for number in range(4)}
    assert main.run_command(["cancel", f"{array}-1"]) == 0
    assert sum(job["state"] == "ended" for job in hub.jobs.values()) == 1
    assert main.run_command(["cancel", array]) == 0
    assert all(job["state"] == "ended" for job in hub.jobs.values())


def test_a_dry_run_of_an_array_shows_its_tasks(hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And asks for nothing."""
    assert main.run_command(["run", "--dry-run", "--array", "0-9", "train.py"]) == 0
    assert "1 GPU for each of 10 tasks" in capsys.readouterr().out
    assert main.run_command(["run", "--dry-run", "--json", "--array", "1,3", "train.py"]) == 0
    assert json.loads(capsys.readouterr().out)["array"] == [1, 3]
    assert hub.asked == []


def test_jobs_after_others_with_tries_and_a_limit_of_running_tasks(
    hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the broker's own schema has them; a predecessor is named as in other commands, an array by its own id."""
    array = "run-20260101-000000-abc123"
    hub.add("run-20260102-000000-fff000", name="prepare")
    for number in range(2):
        hub.add(f"{array}-{number}", name="sweep", array=array)
    words = ["run", "-d", "--array", "0-15%4", "--after", "prepare", "--retry", "2", "train.py"]
    assert main.run_command(words) == 0
    request = schemas.ArrayRequest.model_validate(hub.asked[-1])
    assert (request.count, request.max_running) == (16, 4)
    assert (request.job.after, request.job.max_retries) == ("run-20260102-000000-fff000", 2)
    for name, after in (("abc123", array), (f"{array}-1", f"{array}-1")):
        assert main.run_command(["run", "-d", "--after", name, "train.py"]) == 0
        job = schemas.JobRequest.model_validate(hub.asked[-1])
        assert (job.after, job.max_retries) == (after, 0)
    capsys.readouterr()
    assert main.run_command(["run", "--dry-run", *words[2:]]) == 0
    assert capsys.readouterr().out.splitlines()[2:5] == [
        "ask for:    1 GPU for each of 16 tasks, 4 at the same time",
        "start:      when run-20260102-000000-fff000 has succeeded",
        "try again:  after a failure, up to twice",
    ]
    hub.add("run-20260103-000000-eee000", name="notebook", detached=False)
    assert main.run_command(["run", "--after", "notebook", "train.py"]) == 2
    assert "is a notebook's launch; only jobs can be waited for" in capsys.readouterr().err


def test_port_and_its_users_are_asked_for_and_its_address_is_shown(
    hub: FakeHub, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The address is for people on stderr, and in the JSON for programs."""
    words = ["run", "--port", "8000", "--allow-user", "ben", "--allow-user", "ben"]
    assert main.run_command([*words, "--dry-run", "train.py"]) == 0
    assert "port:       8000, at an address of the hub for you and ben" in capsys.readouterr().out
    assert main.run_command([*words, "-d", "--json", "train.py"]) == 0
    job = schemas.JobRequest.model_validate(hub.asked[-1])
    assert (job.port, job.port_users) == (8000, ("ben",))
    shown = capsys.readouterr()
    assert json.loads(shown.out)["url"] == f"{hub.url}/services/broker/ports/{hub.job()['id']}/"
    (project / "serve.yaml").write_text("run: x\nresources: {ports: 8080}\n")
    assert main.run_command(["run", "-d", "serve.yaml"]) == 0
    assert schemas.JobRequest.model_validate(hub.asked[-1]).port == 8080
