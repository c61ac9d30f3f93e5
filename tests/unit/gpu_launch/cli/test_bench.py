"""The command `bench`: a job of a module, for which nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.cli import main
from gpu_launch.cli.submission import job_submission
from gpu_launch.options import definition
from tests.support.hub.fake_hub import FakeHub
from tests.support.hub.laptop import logged_in


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub; the current folder has a file, which is not sent."""
    with logged_in(tmp_path, monkeypatch, {"x.py": "x"}) as hub:
        yield hub


def test_bench_runs_a_module_on_the_nodes(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is followed to its end, whose output has the tables."""
    ran: list[tuple[job_submission.JobSubmission, dict[str, bool]]] = []
    monkeypatch.setattr(job_submission, "run", lambda _context, job, **how: ran.append((job, how)))
    assert main.run_command(["bench", "--nnodes", "2", "--model", "RTX 5070"]) == 0
    ((job, how),) = ran
    assert (job.nnodes, job.nproc_per_node, job.demand.models, job.load) == (2, 1, ("RTX 5070",), None)
    assert job.manifest.words[-1] == definition.BENCH_MODULE
    assert "--module" in job.manifest.words
    assert how == {"detach": False, "dry_run": False}


def test_range_of_nodes_is_refused(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them are measured together."""
    assert main.run_command(["bench", "--nnodes", "1:2"]) == 2
    assert "one number of nodes is needed" in capsys.readouterr().err
