"""`gpu-launch stacks` against a hub over real HTTP; the run's launch answers in the home."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.cli import main
from gpu_launch.common.run_folder import open_run
from gpu_launch.output import stack_request
from gpu_launch.output.stacks import Frame, RankStacks
from tests.support.hub.fake_hub import FakeHub
from tests.support.hub.laptop import logged_in

RUN = "run-20260101-000000-abc123"
FOUND = [
    RankStacks(rank=rank, node="rig1", text=f"Thread of {rank}", frames=(Frame(file="t.py", line=1, function="f"),))
    for rank in range(2)
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with logged_in(tmp_path, monkeypatch, {"train.py": ""}) as hub:
        hub.add(RUN, name="train.py")
        yield hub


@pytest.fixture
def answers(hub: FakeHub) -> Iterator[list[str]]:
    """A launch that answers requests in the run's folder, and the requests that it took."""
    run, taken, is_over = open_run(hub.home, RUN), [], threading.Event()
    run.root.mkdir(parents=True)

    def serve() -> None:
        while not is_over.wait(0.01):
            if (request := stack_request.pop(run)) is not None:
                taken.append(request)
                stack_request.answer(run, request, FOUND)

    thread = threading.Thread(target=serve)
    thread.start()
    yield taken
    is_over.set()
    thread.join()


def test_stacks_are_shown_in_groups(hub: FakeHub, answers: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each command asks again; `--full` has all threads, `--json` everything."""
    hub.run()
    assert main.run_command(["stacks", "train.py"]) == 0
    assert capsys.readouterr().out == "where the 2 ranks are:\n  2 ranks (0-1): at t.py:1 in f\n"
    assert main.run_command(["stacks", "abc123", "--full"]) == 0
    assert "\nrank 1 on rig1\nThread of 1\n" in capsys.readouterr().out
    assert main.run_command(["stacks", RUN, "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)
    assert (group["ranks"], group["threads"]) == ([0, 1], {"0": "Thread of 0", "1": "Thread of 1"})
    assert len(set(answers)) == 3


def test_runs_that_cannot_answer_are_refused(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ended one at once, and one without running ranks after a while."""
    monkeypatch.setattr(stack_request, "ANSWER_S", 0.0)
    hub.run()
    assert main.run_command(["stacks", "train.py"]) == 1
    assert "did not answer within 0 s: its ranks are not running yet" in capsys.readouterr().err
    hub.end(0)
    assert main.run_command(["stacks", "train.py"]) == 2
    assert capsys.readouterr().err == f"gpu-launch: {RUN} has ended: gpu-launch logs {RUN} shows its output.\n"
    assert main.run_command(["stacks", "other"]) == 2
    assert "There is no job other." in capsys.readouterr().err
