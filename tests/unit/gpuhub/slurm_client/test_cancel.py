"""How a job that ignores SIGTERM is ended without waiting for KillWait."""

from __future__ import annotations

import pytest

from gpuhub.slurm_client import job_control
from gpuhub.slurm_client.models import SlurmJob, SlurmJobState


def job(state: SlurmJobState, *, is_completing: bool = False) -> SlurmJob:
    return SlurmJob(id=7, name="x", user_id=1, state=state, is_completing=is_completing)


PENDING, RUNNING = job(SlurmJobState.PENDING), job(SlurmJobState.RUNNING)
CANCELLED = job(SlurmJobState.CANCELLED)


@pytest.mark.parametrize(
    ("seen", "done"),
    [
        ([None], []),
        ([RUNNING, RUNNING, None], ["signal", "signal"]),
        ([job(SlurmJobState.RUNNING, is_completing=True)], []),
        ([PENDING, CANCELLED], ["withdraw"]),
        # It started in between.
        ([PENDING, RUNNING, RUNNING, None], ["withdraw", "signal", "signal"]),
        ([job(SlurmJobState.SUSPENDED)], []),
        ([RUNNING] * 9, ["signal"] * 5),
    ],
)
async def test_job_is_cancelled_or_signalled_by_its_observed_state(
    monkeypatch: pytest.MonkeyPatch, seen: list[SlurmJob | None], done: list[str]
) -> None:
    monkeypatch.setattr(job_control, "_PAUSES_S", (0.0,) * 5)
    looks, acts = iter(seen), []

    async def find_job() -> SlurmJob | None:
        return next(looks)

    async def signal() -> None:
        acts.append("signal")

    async def withdraw() -> None:
        acts.append("withdraw")

    await job_control.signal_until_ended(find_job, signal, withdraw)
    assert acts == done
