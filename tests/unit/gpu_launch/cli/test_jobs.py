"""`gpu-launch ps`, `cancel`, `status`, task files and completion against a hub over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gpu_launch.cli import job_lookup, main
from gpu_launch.cli.connection import credentials
from gpu_launch.common import job_manifest
from tests.support.golden import check_golden
from tests.support.hub.fake_hub import FakeHub
from tests.support.hub.laptop import logged_in

GOLDEN = Path(__file__).with_name("golden")

TASK = """\
name: hello
workdir: code
num_nodes: 2
resources:
  accelerators: RTX5070:1
  disk_size: 100
envs:
  GREETING: hi
  NAME:
setup: pip list
run: |
  echo $GREETING $NAME $SKYPILOT_NODE_RANK
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub; the current folder has a task file."""
    monkeypatch.setenv("COLUMNS", "100")
    with logged_in(tmp_path, monkeypatch, {"code/x.py": "x", "task.yaml": TASK}) as hub:
        yield hub


def test_ps_lists_only_the_users_jobs(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Newest first; ended ones with -a; nobody else's, which an administrator is told of as well."""
    for number, name in enumerate(("first", "second", "third")):
        hub.add(f"run-2026010{number}-000000-abc123", name=name)
        hub.run()
    hub.end(3)
    hub.add("run-20260109-000000-abc123", name="bens", owner="ben")
    assert main.run_command(["ps"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["NAME", "second", "first"]
    assert main.run_command(["ps", "-a", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(job["name"], job["state"]) for job in told] == [
        ("third", "failed"),
        ("second", "running"),
        ("first", "running"),
    ]


def test_ps_without_jobs(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """A sentence for people, an empty list for scripts."""
    assert main.run_command(["ps"]) == 0
    assert capsys.readouterr().out == "You have no waiting or running jobs. gpu-launch ps -a lists ended ones.\n"
    assert main.run_command(["ps", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_cancel(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Named ones, all of one's own, and one that has ended already."""
    for number in range(3):
        hub.add(f"run-2026010{number}-000000-abc12{number}", name=f"job{number}")
    hub.add("run-20260109-000000-abc129", name="bens", owner="ben")
    assert main.run_command(["cancel", "job0", "abc121", "job0"]) == 0
    assert capsys.readouterr().out == (
        "run-20260100-000000-abc120 is being ended\nrun-20260101-000000-abc121 is being ended\n"
    )
    assert main.run_command(["cancel", "job0"]) == 0
    assert "has already ended" in capsys.readouterr().out
    assert main.run_command(["cancel", "--all", "--json"]) == 0
    assert [job["run_id"] for job in json.loads(capsys.readouterr().out)] == ["run-20260102-000000-abc122"]
    assert [job["state"] for job in hub.jobs.values()] == ["ended", "ended", "ended", "waiting"]
    assert main.run_command(["cancel", "job0", "--all"]) == 2


def test_status(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes, cards, what is free and who has the rest."""
    hub.held = {"GPU-rig1-0": "ben"}
    assert main.run_command(["status"]) == 0
    check_golden(capsys.readouterr().out, GOLDEN / "status.txt")
    assert main.run_command(["status", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [node["free"] for node in told["nodes"]] == [1, 1, 1]
    assert told["nodes"][0]["gpus"][0]["holder"] == "ben"


def test_task_file_is_submitted_as_a_job(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder is sent, its shape and models are asked for, its commands and variables are in the order."""
    assert main.run_command(["run", "-d", "task.yaml", "--env"]) == 2
    assert main.run_command(["run", "-d", "--env", "NAME=ada", "--scavenge", "task.yaml"]) == 0
    assert "task.yaml: line 6: resources.disk_size is ignored" in capsys.readouterr().err
    (asked,) = hub.asked
    assert (asked["nnodes"], asked["nproc_per_node"], asked["models"]) == (2, 1, ["RTX 5070"])
    assert (asked["name"], asked["scavenge"], asked["detached"]) == ("hello", True, True)
    ordered = job_manifest.parse_manifest((hub.home / ".gpu_launch/jobs" / asked["run_id"] / "job.json").read_text())
    assert ordered.task == job_manifest.TaskCommands(setup="pip list", run="echo $GREETING $NAME $SKYPILOT_NODE_RANK\n")
    assert ordered.environ == {"GREETING": "hi", "NAME": "ada"}
    assert ordered.words == ()
    assert (hub.home / ordered.folder / "x.py").read_text() == "x"


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        (["--nnodes", "1"], (1, 1, ["RTX 5070"])),
        (["--model", "rtx 5090", "--nnodes", "1", "--nproc-per-node", "2"], (1, 2, ["RTX 5090"])),
        (["--gpus", "2", "--model", "RTX 5090"], (1, 2, ["RTX 5090"])),
    ],
)
def test_the_command_line_overrides_a_task_file(
    hub: FakeHub, words: list[str], shape: tuple[int, int, list[str]]
) -> None:
    """The number of nodes, of GPUs, and their model."""
    assert main.run_command(["run", "-d", "-e", "NAME=x", *words, "task.yaml"]) == 0
    (asked,) = hub.asked
    assert (asked["nnodes"], asked["nproc_per_node"], asked["models"]) == shape


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["task.yaml"], "task.yaml: envs.NAME has no value in the file"),
        (["-e", "NAME=x", "task.yaml", "more"], "A task file takes no arguments, and more was given"),
        (["-e", "NAME=x", "--max-restarts", "2", "task.yaml"], "--max-restarts is about ranks"),
        (["-e", "NAME=x", "--predict", "task.yaml"], "--predict is about ranks"),
        (["-e", "NAME=x", "--comm", "auto", "task.yaml"], "--comm auto: a prediction is for a script in your home"),
        (["--gpus", "2", "--predict", "train.py"], "--predict runs on one card: --gpus does not go with it"),
        (["-e", "NAME=x", "--nnodes", "1:2", "task.yaml"], "task.yaml: --nnodes MIN:MAX is for scripts"),
        (["nothing.yml"], "nothing.yml: it cannot be read: No such file or directory."),
    ],
)
def test_unsupported_task_files_are_refused(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    """In one line, before anything is sent."""
    assert main.run_command(["run", *words]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1
    assert not any(line.startswith("PUT") for line in hub.requests)


def test_completion_caches_runs(hub: FakeHub) -> None:
    """One question for many tabs; detached jobs alone; nothing when the hub is away."""
    hub.add("run-20260101-000000-abc123", name="train")
    hub.add("run-20260102-000000-abd123", detached=False)
    context = click.Context(main.cli)

    def complete(begun: str) -> list[str]:
        return [item.value for item in job_lookup.complete_run(context, click.Argument(["run"]), begun)]

    assert complete("run-2026") == ["run-20260101-000000-abc123"]
    assert complete("run-x") == []
    assert hub.requests == ["GET /jobs"]
    for kept in credentials.get_config_file().parent.glob("runs-*.json"):
        assert kept.stat().st_mode & 0o777 == 0o600
        kept.unlink()
    hub.outage = 503
    assert complete("run-2026") == []


def test_tasks_of_an_array_are_one_table(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """In their order, ended ones too, with the states counted."""
    for number in range(11):
        hub.add(f"run-20260101-000000-abc123-{number}", name="sweep", array="run-20260101-000000-abc123")
    hub.add("run-20260102-000000-fff000", name="other")
    hub.end(3, "run-20260101-000000-abc123-0")
    assert main.run_command(["ps", "abc123"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0].rpartition("-")[2] for line in lines[1:12]] == [str(number) for number in range(11)]
    assert lines[12] == "11 tasks of run-20260101-000000-abc123: 10 waiting, 1 failed"
    assert main.run_command(["ps", "other"]) == 2
    assert "is a job of its own, and no array or job group" in capsys.readouterr().err
