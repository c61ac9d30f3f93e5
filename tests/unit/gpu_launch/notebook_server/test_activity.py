"""What a notebook's server reports, from the models of its kernels and terminals and from real processes."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpu_launch.notebook_server import activity
from gpu_launch.notebook_server.activity import Activity
from gpu_launch.notebook_server.programs import UserPrograms

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
NONE = UserPrograms(running=frozenset(), used_at=None)


def ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def model(minutes: float, state: str = "idle") -> dict[str, Any]:
    """A kernel's model, with the time as Jupyter Server 2.21 writes it."""
    return {"last_activity": ago(minutes).isoformat().replace("+00:00", "Z"), "execution_state": state}


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of the tests may run ranks of other tests."""
    monkeypatch.setattr(activity, "has_ranks", lambda: False)


def assess(**values: Any) -> Activity:
    everything = {"now": NOW, "started_at": ago(300), "kernels": [], "terminals": [], "saved_at": None}
    return activity.assess(**{**everything, "programs": NONE, **values})


@pytest.mark.parametrize(
    ("values", "minutes"),
    [
        ({}, 300),
        ({"kernels": [model(90), model(70)]}, 70),
        ({"kernels": [model(90)], "terminals": [model(20)]}, 20),
        ({"kernels": [model(90)], "saved_at": ago(5)}, 5),
        ({"kernels": [model(-1)]}, 0),
    ],
)
def test_latest_activity_counts(no_ranks: None, values: dict[str, Any], minutes: float) -> None:
    """Of kernels, terminals, saved files and the start; a clock that is behind gives no negative span."""
    assert assess(**values) == Activity(is_busy=False, inactive_s=minutes * 60)


def test_busy_kernel_is_busy(no_ranks: None) -> None:
    """A cell that prints nothing for hours is still running."""
    assert assess(kernels=[model(1), model(200, "busy")]).is_busy


def test_running_program_is_activity(no_ranks: None) -> None:
    """Also a quiet one; an SSH session at its prompt is as long ago as its terminal was used."""
    running = UserPrograms(running=frozenset({"a program"}), used_at=None)
    assert assess(programs=running) == Activity(is_busy=False, inactive_s=0)
    assert assess(programs=UserPrograms(running=frozenset(), used_at=ago(3))).inactive_s == 180


@pytest.mark.process
def test_ranks_in_the_own_container_are_found() -> None:
    """A process with the program that `start_local_worker` starts is one; it need not get further than its imports."""
    command = [sys.executable, "-c", "print(flush=True); input()", "gpu_launch.worker.main"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert activity.has_ranks()
        process.kill()
