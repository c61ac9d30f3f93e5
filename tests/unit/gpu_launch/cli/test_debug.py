"""`gpu-launch debug` against a hub over real HTTP: which worker, and what is refused."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.cli import main
from gpu_launch.common.run_folder import open_run
from gpu_launch.output import stack_request
from gpu_launch.output.stacks import RankStacks
from tests.support.hub.fake_hub import FakeHub
from tests.support.hub.laptop import logged_in

RUN = "run-20260101-000000-abc123"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with a running job, whose ranks 0 and 1 are in its worker and rank 2 in a notebook's own container."""
    with logged_in(tmp_path, monkeypatch, {"train.py": ""}) as hub:
        hub.add(RUN, name="train.py")
        hub.run()
        run, is_over = open_run(hub.home, RUN), threading.Event()
        run.root.mkdir(parents=True)
        own = hub.job(RUN)["workers"][0]["node"]
        found = [RankStacks(rank=rank, node=own if rank < 2 else "elsewhere") for rank in range(3)]

        def serve() -> None:
            while not is_over.wait(0.01):
                if (request := stack_request.pop(run)) is not None:
                    stack_request.answer(run, request, found)

        thread = threading.Thread(target=serve)
        thread.start()
        yield hub
        is_over.set()
        thread.join()


@pytest.mark.parametrize("listen", [(), ("--listen", "5678")])
def test_the_workers_program_runs_in_this_terminal(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], listen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other route than the terminal's is used, which is its owner's alone."""
    shells: list[tuple[int, list[str]]] = []

    class Session:
        def run(self) -> int:
            return 0

    def open_shell(_hub: object, job_id: str, *, worker: int, command: str) -> Session:
        assert job_id == hub.job(RUN)["id"]
        shells.append((worker, shlex.split(command)))
        return Session()

    monkeypatch.setattr("gpu_launch.cli.debug.open_shell", open_shell)
    assert main.run_command(["debug", "train.py", "--rank", "1", *listen]) == 0
    assert shells == [(0, ["gpu-launch", "debug", "--here", RUN, "--rank", "1", *listen])]
    out = capsys.readouterr().out
    assert (f"ssh -N -L 5678:localhost:5678 gpuhub-{RUN}.0\n" in out) == bool(listen)


def test_what_cannot_be_debugged_is_refused(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command(["debug", "train.py", "--rank", "5"]) == 2
    assert f"--rank 5: {RUN} has the ranks 0, 1, 2." in capsys.readouterr().err
    assert main.run_command(["debug", "train.py", "--rank", "2"]) == 2
    assert "Rank 2 runs in the notebook's own container on elsewhere" in capsys.readouterr().err
    assert main.run_command(["debug", "train.py", "--listen", "80"]) == 2
    assert "--listen" in capsys.readouterr().err
    hub.end(0)
    assert main.run_command(["debug", "train.py"]) == 2
    assert f"{RUN} has ended" in capsys.readouterr().err
