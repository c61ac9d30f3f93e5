"""How a job that ignores SIGTERM is ended without waiting for KillWait."""

from __future__ import annotations

import pytest

from gpuhub.slurm import ending
from gpuhub.slurm.values import Job, State


def job(state: State, *, is_completing: bool = False) -> Job:
    return Job(id=7, name="x", user_id=1, state=state, is_completing=is_completing)


PENDING, RUNNING = job(State.PENDING), job(State.RUNNING)
CANCELLED = job(State.CANCELLED)


@pytest.mark.parametrize(
    ("seen", "done"),
    [
        ([None], []),
        ([RUNNING, RUNNING, None], ["signal", "signal"]),
        ([job(State.RUNNING, is_completing=True)], []),
        ([PENDING, CANCELLED], ["withdraw"]),
        # It started in between.
        ([PENDING, RUNNING, RUNNING, None], ["withdraw", "signal", "signal"]),
        ([job(State.SUSPENDED)], []),
        ([RUNNING] * 9, ["signal"] * 5),
    ],
)
async def test_what_is_done_follows_what_is_seen(
    monkeypatch: pytest.MonkeyPatch, seen: list[Job | None], done: list[str]
) -> None:
    monkeypatch.setattr(ending, "_PAUSES_S", (0.0,) * 5)
    looks, acts = iter(seen), []

    async def look() -> Job | None:
        return next(looks)

    async def signal() -> None:
        acts.append("signal")

    async def withdraw() -> None:
        acts.append("withdraw")

    await ending.signal_until_over(look, signal, withdraw)
    assert acts == done
