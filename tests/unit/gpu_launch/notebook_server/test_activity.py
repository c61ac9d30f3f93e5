"""What a notebook's server reports, from the models of its kernels and terminals and from real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpu_launch.notebook_server import activity
from gpu_launch.notebook_server.activity import Activity

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)


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
    everything = {"now": NOW, "started_at": ago(300), "kernels": [], "terminals": [], "shells": [], "saved_at": None}
    return activity.assess(**{**everything, **values})


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


@pytest.fixture
def shell() -> Iterator[subprocess.Popen[bytes]]:
    """A shell that waits for its input."""
    with subprocess.Popen(["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.process
def test_program_in_a_terminal_is_activity(no_ranks: None, shell: subprocess.Popen[bytes]) -> None:
    """A quiet program counts while it runs; a shell at its prompt, or one that has ended, does not."""
    assert assess(shells=[shell.pid]).inactive_s == 300 * 60
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdin.write(b"sh -c 'echo started; read x' <&0; echo\n")
    shell.stdin.flush()
    assert shell.stdout.readline() == b"started\n"
    assert assess(shells=[shell.pid]) == Activity(is_busy=False, inactive_s=0, is_in_terminal=True)
    shell.kill()
    shell.wait()
    assert assess(shells=[shell.pid]).inactive_s == 300 * 60


@pytest.mark.process
def test_ranks_in_the_own_container_are_found() -> None:
    """A process with the program that `start_local_worker` starts is one; it need not get further than its imports."""
    command = [sys.executable, "-c", "print(flush=True); input()", "gpu_launch.worker.main"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert activity.has_ranks()
        process.kill()
