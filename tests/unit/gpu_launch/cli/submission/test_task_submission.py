"""Task files as jobs: what is sent and asked for, and pipelines, against a hub over real HTTP."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_launch.cli import main
from gpu_launch.common import job_manifest
from gpu_launch.detached import task_main
from tests.support.hub.fake_hub import FakeHub
from tests.support.hub.laptop import logged_in

PIPELINE = """\
name: nightly
---
name: prepare
run: echo one
---
run: echo two
---
name: report
run: echo three
"""
GROUP = "name: rl\nexecution: parallel\n---\nname: train\nrun: x\n---\nrun: y\n"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub; the current folder has a workdir and a file beside it."""
    with logged_in(tmp_path, monkeypatch, {"code/x.py": "x", "data.txt": "data"}) as hub:
        yield hub


def _write(text: str) -> None:
    Path("task.yaml").write_text(text)


def _read_manifest(hub: FakeHub, number: int = 0) -> job_manifest.JobManifest:
    run_id = hub.asked[number]["run_id"]
    return job_manifest.parse_manifest((hub.home / ".gpu_launch/jobs" / run_id / "job.json").read_text())


def _end_jobs(hub: FakeHub, codes: list[int]) -> Callable[[], None]:
    """Return a function that runs the jobs as they are asked for, each to its exit code."""

    def serve() -> None:
        for number, code in enumerate(codes, start=1):
            while len(hub.asked) < number:
                if ended.wait(0.01):
                    return
            run_id = hub.asked[-1]["run_id"]
            hub.run(run_id)
            hub.write(f"output {number}\n", run_id)
            hub.end(code, run_id)

    ended = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()

    def stop() -> None:
        ended.set()
        thread.join()

    return stop


def test_mode_of_communication_is_a_variable_of_the_commands(hub: FakeHub) -> None:
    """They start Python themselves."""
    _write("run: torchrun train.py\n")
    assert main.run_command(["run", "-d", "--comm", "powersgd", "task.yaml"]) == 0
    assert _read_manifest(hub).environ == {"GPU_LAUNCH_COMM": "powersgd"}


def test_mounts_and_sky_workdir_are_in_the_jobs_folder(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Files are sent with the working directory, and the commands name them there."""
    _write(
        "workdir: code\nenvs: {CONF: ~/conf}\nfile_mounts:\n  ~/conf/data: ./data.txt\n  sub/data.txt: data.txt\n"
        "setup: ls ~/conf/data\nrun: cd ~/sky_workdir\n"
    )
    assert main.run_command(["run", "-d", "task.yaml"]) == 0
    manifest = _read_manifest(hub)
    folder = hub.home / manifest.folder
    assert manifest.task == job_manifest.TaskCommands(
        setup=f"ls ~/{manifest.folder}/.file_mounts/conf/data", run=f"cd ~/{manifest.folder}"
    )
    assert [(folder / name).read_text() for name in ("x.py", ".file_mounts/conf/data", "sub/data.txt")] == [
        "x",
        "data",
        "data",
    ]
    assert f"the commands find ~/sky_workdir and file_mounts in the job's own folder, ~/{manifest.folder}" in (
        capsys.readouterr().err
    )


#: In the form of SkyPilot's own check of a job's environment.
ENVIRONMENT = """\
num_nodes: 2
workdir: code
file_mounts: {~/in.txt: data.txt}
envs: {GREETING: hello}
resources: {infra: aws, ordered: [{accelerators: H100}, {accelerators: RTX5090}]}
setup: |
  echo "export TEST_VAR=test GREETING=no" >> ~/.bashrc
  [[ -v CUDA_VISIBLE_DEVICES ]] && exit 1 || exit 0
run: |
  [[ -z "${TEST_VAR}" ]] && exit 1
  [[ -f ~/sky_workdir/x.py ]] || exit 2
  [[ "$(cd ~/sky_workdir && pwd)" = "$PWD" ]] || exit 3
  echo "${SKYPILOT_NODE_IPS}" | wc -l | grep 2 || exit 4
  [[ -z "$SKYPILOT_TASK_ID" || "$SKYPILOT_NUM_NODES$SKYPILOT_NODE_RANK" != 21 ]] && exit 5
  echo "$GREETING $(cat "$HOME/in.txt")" > result
"""


@pytest.mark.process
def test_a_file_in_skypilots_form_runs_unchanged(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file on the laptop to the commands in a home with other runs."""
    _write(ENVIRONMENT)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main.run_command(["run", "-d", "--model", "RTX 5090", "task.yaml"]) == 2, "no two nodes have this model"
    assert main.run_command(["run", "-d", "--nnodes", "1", "task.yaml"]) == 0
    manifest = _read_manifest(hub)
    assert manifest.task is not None
    monkeypatch.chdir(hub.home / manifest.folder)
    for name, value in manifest.environ.items():
        monkeypatch.setenv(name, value)
    variables = task_main.build_variables(rank=1, ips=["10.0.0.2", "10.0.0.3"], gpus_per_node=1, task_id="sky-1_x_1")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        bash = task_main.Bash(kept=manifest.environ)
        codes = [
            bash.run(commands, variables | {"HOME": str(hub.home)})
            for commands in (manifest.task.setup, manifest.task.run)
        ]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert codes == [0, 0]
    assert Path("result").read_text() == "hello data\n"


def test_mounts_are_sent_without_a_workdir_and_count_for_the_limit(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    """As everything that is sent."""
    _write("file_mounts: {in.txt: data.txt}\nrun: cat in.txt\n")
    assert main.run_command(["run", "--dry-run", "--json", "task.yaml"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == ["in.txt"]
    Path("data.txt").write_bytes(bytes(2 * 1024**2))
    assert main.run_command(["run", "--dry-run", "--max-size", "1M", "task.yaml"]) == 2
    assert "The largest: in.txt (2.0 MiB)" in capsys.readouterr().err


def test_each_key_for_clouds_is_one_line_on_standard_error(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """The file runs."""
    _write("resources:\n  infra: aws\n  use_spot: true\nrun: x\n")
    assert main.run_command(["run", "--dry-run", "task.yaml"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "gpu-launch: task.yaml: line 2: `resources.infra: aws` is for clouds and has no effect here",
        "gpu-launch: task.yaml: line 3: `resources.use_spot: true` is for clouds and has no effect here; --scavenge asks "
        "for GPUs that others may take when they need them",
        "gpu-launch: task.yaml: no accelerators are named; every node has one GPU",
    ]


def test_first_alternative_that_the_cluster_can_have_is_taken(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Later ones and those that it lacks are not; the choice is a line."""
    ordered = (
        "resources:\n  ordered:\n    - accelerators: H100:8\n    - accelerators: RTX5090:%d\n    - cpus: 4\nrun: x\n"
    )
    _write(ordered % 2)
    assert main.run_command(["run", "-d", "task.yaml"]) == 0
    assert "resources: RTX5090:2 is taken, the first alternative that the cluster can have" in capsys.readouterr().err
    _write(ordered % 9)
    assert main.run_command(["run", "-d", "task.yaml"]) == 0
    assert "resources: one GPU of any model is taken" in capsys.readouterr().err
    assert [(job["nproc_per_node"], job.get("models")) for job in hub.asked] == [(2, ["RTX 5090"]), (1, None)]
    _write("resources:\n  any_of: [{accelerators: 'H100:8'}, {accelerators: 'RTX5090:9'}]\nrun: x\n")
    assert main.run_command(["run", "-d", "task.yaml"]) == 2
    error = capsys.readouterr().err
    assert "the cluster can have none of the alternatives. H100:8: resources.accelerators asks for H100" in error
    assert "RTX5090:9: 9 RTX 5090s is more than any node of the cluster has" in error


def test_a_container_image_needs_a_profile(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands may not work in another image; who names a profile has chosen one."""
    _write("resources: {image_id: 'docker:nvcr.io/x'}\nrun: x\n")
    assert main.run_command(["run", "-d", "task.yaml"]) == 2
    assert "resources.image_id: docker:nvcr.io/x is a container image, and jobs run in the images" in (
        capsys.readouterr().err
    )
    assert main.run_command(["run", "--dry-run", "--profile", "torch", "task.yaml"]) == 0
    assert "resources.image_id is ignored: the job runs in the image of the profile torch" in capsys.readouterr().err


def test_tasks_of_an_array_have_skypilots_job_ranks(hub: FakeHub) -> None:
    """From 0, whatever the indexes are."""
    _write("run: echo $SKYPILOT_JOB_RANK of $SKYPILOT_NUM_JOBS\n")
    assert main.run_command(["run", "--array", "10-30:10", "task.yaml"]) == 0
    manifests = [
        job_manifest.parse_manifest(path.read_text()) for path in sorted(hub.home.glob(".gpu_launch/jobs/*/job.json"))
    ]
    assert [manifest.environ for manifest in manifests] == [
        {"GPU_LAUNCH_ARRAY_INDEX": str(index), "SKYPILOT_JOB_RANK": str(rank), "SKYPILOT_NUM_JOBS": "3"}
        for rank, index in enumerate((10, 20, 30))
    ]


@pytest.mark.parametrize(
    ("text", "words", "error"),
    [
        ("run: cd ~/sky_workdir\n", ["--no-workdir"], "the commands name ~/sky_workdir, which is the folder"),
        ("file_mounts: {a: data.txt}\nrun: x\n", ["--no-workdir"], "file_mounts are sent with the job's folder"),
        (PIPELINE, ["--json"], "--json is for one task, or with --detach"),
        (GROUP, ["--array", "0-1"], "--array is for one task"),
        (GROUP + "---\nname: train\nrun: z\n", [], "2 tasks are named 'train': in a job group each has its own name"),
        (GROUP + "---\nrun: z\n" * 15, [], "a job group has 16 tasks at most, and this one has 17"),
        (PIPELINE, ["--array", "0-1"], "--array is for one task"),
        (PIPELINE, ["--name", "x"], "--name is for one job, and this file has several tasks"),
        (PIPELINE + "---\nrun: x\nresources: {gpus: H100}\n", [], "asks for H100, and the cluster has"),
    ],
)
def test_command_lines_that_cannot_be_are_refused_before_anything_is_sent(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], text: str, words: list[str], error: str
) -> None:
    """Also where a later task of a pipeline cannot run."""
    _write(text)
    assert main.run_command(["run", *words, "task.yaml"]) == 2
    assert error in capsys.readouterr().err
    assert hub.asked == []
    assert not any(line.startswith("PUT") for line in hub.requests)


def test_tasks_of_a_pipeline_run_one_after_another(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is requested when the one before has succeeded, with a folder of its own."""
    _write(PIPELINE)
    stop = _end_jobs(hub, [0, 0, 0])
    try:
        assert main.run_command(["run", "task.yaml"]) == 0
    finally:
        stop()
    assert [job["name"] for job in hub.asked] == ["prepare", "nightly-2", "report"]
    assert len({_read_manifest(hub, number).folder for number in range(3)}) == 3
    shown = capsys.readouterr()
    assert shown.out == "output 1\noutput 2\noutput 3\n"
    assert "gpu-launch: task 2 of 3: nightly-2\n" in shown.err


def test_a_pipeline_ends_with_its_first_failing_task(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status is that task's, and those that are not started are named."""
    _write(PIPELINE)
    stop = _end_jobs(hub, [0, 7, 0])
    try:
        assert main.run_command(["run", "task.yaml"]) == 7
    finally:
        stop()
    assert [job["name"] for job in hub.asked] == ["prepare", "nightly-2"]
    assert "gpu-launch: not started: report\n" in capsys.readouterr().err


def test_detached_pipeline_is_a_chain_of_jobs(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """The laptop is not needed: each starts when the one before has succeeded, the first after another run."""
    hub.add("run-20260101-000000-abc123", name="first")
    _write(PIPELINE)
    assert main.run_command(["run", "--detach", "--json", "--after", "first", "task.yaml"]) == 0
    shown = capsys.readouterr()
    jobs = json.loads(shown.out)
    runs = [job["run_id"] for job in jobs]
    assert [job["name"] for job in jobs] == ["prepare", "nightly-2", "report"]
    assert [job["after"] for job in jobs] == ["run-20260101-000000-abc123", *runs[:2]]
    assert [job["folder"] for job in jobs] == [_read_manifest(hub, number).folder for number in range(3)]
    assert all(job["batch"] for job in hub.asked)
    assert "3 tasks run one after another without this command" in shown.err


def test_tasks_of_a_job_group_are_requested_together(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the laptop, all after another run; each has the group's id, by which the tasks find each other."""
    hub.add("run-20260101-000000-abc123", name="first")
    _write(GROUP)
    assert main.run_command(["run", "--json", "--after", "first", "task.yaml"]) == 0
    shown = capsys.readouterr()
    jobs = json.loads(shown.out)
    assert [(job["name"], job["after"]) for job in jobs] == [
        ("train", "run-20260101-000000-abc123"), ("rl-2", "run-20260101-000000-abc123")
    ]  # fmt: skip
    assert all(job["batch"] for job in hub.asked)
    [group] = {job["array"] for job in jobs}
    assert [job["run_id"] for job in jobs] == [f"{group}-0", f"{group}-1"]
    assert [_read_manifest(hub, at).environ for at in range(2)] == [{"SKYPILOT_JOBGROUP_NAME": group}] * 2
    assert f"2 tasks start together and run without this command: gpu-launch ps {group} lists them" in shown.err


def test_refused_job_group_sends_nothing(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """The broker checks the whole group before the files are sent."""
    _write(GROUP)
    hub.check_refusal = "the tasks of the job group never fit at the same time"
    assert main.run_command(["run", "task.yaml"]) == 1
    assert "never fit at the same time" in capsys.readouterr().err
    assert not any(line.startswith("PUT") for line in hub.requests)


def test_detached_pipeline_runs_as_a_whole_or_not_at_all(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a later task is refused, those before it are cancelled."""
    _write(PIPELINE)
    hub.job_refusals = {"report": "one user may hold at most 1"}
    assert main.run_command(["run", "--detach", "task.yaml"]) == 1
    assert [(job["name"], job["state"]) for job in hub.jobs.values()] == [("prepare", "ended"), ("nightly-2", "ended")]
    assert "gpu-launch: one user may hold at most 1\n" in capsys.readouterr().err
    hub.check_refusal = "there is no profile 'nosuch'"
    hub.requests.clear()
    assert main.run_command(["run", "--detach", "task.yaml"]) == 1
    assert not any(line.startswith("PUT") for line in hub.requests)


def test_dry_run_of_a_pipeline_shows_all_tasks(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """As text or as one JSON document."""
    _write(PIPELINE)
    assert main.run_command(["run", "--dry-run", "--json", "task.yaml"]) == 0
    assert [plan["name"] for plan in json.loads(capsys.readouterr().out)] == ["prepare", "nightly-2", "report"]
    assert main.run_command(["run", "--dry-run", "task.yaml"]) == 0
    assert capsys.readouterr().out.count("and run:    the task's commands on every node") == 3
    assert hub.asked == []


@pytest.mark.parametrize(("words", "tries"), [([], 3), (["--retry", "0"], 0), (["--retry", "5"], 5)])
def test_a_failed_task_is_tried_again_as_skypilots_file_says(hub: FakeHub, words: list[str], tries: int) -> None:
    """The command line counts before the file."""
    Path("again.yaml").write_text(
        "resources:\n  job_recovery:\n    strategy: FAILOVER\n    max_restarts_on_errors: 3\nrun: python train.py\n"
    )
    assert main.run_command(["run", "-d", *words, "again.yaml"]) == 0
    assert hub.asked[-1].get("max_retries", 0) == tries


def test_keys_that_need_docker_are_passed_over_without_it(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """An unchanged file runs, with a line for each; what the command line names is left to the broker."""
    hub.has_containers = False
    _write("resources:\n  ports: 8000\n  job_recovery:\n    max_restarts_on_errors: 3\nrun: python train.py\n")
    assert main.run_command(["run", "-d", "task.yaml"]) == 0
    notes = capsys.readouterr().err
    assert "task.yaml: resources.ports is ignored: on nodes without Docker" in notes
    assert "task.yaml: resources.job_recovery.max_restarts_on_errors is ignored: a job on nodes" in notes
    assert "port" not in hub.asked[-1]
    assert "max_retries" not in hub.asked[-1]
    assert main.run_command(["run", "-d", "--port", "80", "--retry", "1", "task.yaml"]) == 0
    assert (hub.asked[-1]["port"], hub.asked[-1]["max_retries"]) == (80, 1)


def test_datasets_of_the_file_are_requested(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """`stage` of the file, unless the command line names others; a wrong name is refused with its line."""
    _write("stage: [datasets/imagenet, datasets/c4/en]\nrun: x\n")
    assert main.run_command(["run", "-d", "task.yaml"]) == 0
    assert hub.asked[-1]["stage"] == ["datasets/imagenet", "datasets/c4/en"]
    assert main.run_command(["run", "-d", "--stage", "datasets/other", "task.yaml"]) == 0
    assert hub.asked[-1]["stage"] == ["datasets/other"]
    for value in ("imagenet", "[imagenet]", "[1]", "{datasets/a: b}"):
        _write(f"run: x\nstage: {value}\n")
        assert main.run_command(["run", "-d", "task.yaml"]) == 2
        assert "line 2: stage " in capsys.readouterr().err
