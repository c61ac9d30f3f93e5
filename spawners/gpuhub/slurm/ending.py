"""The end of a job that ignores SIGTERM, without KillWait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gpuhub.slurm.values import Job, State

#: Between one signal and the next, seconds.
_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6)


async def signal_until_over(
    look: Callable[[], Awaitable[Job | None]],
    signal: Callable[[], Awaitable[None]],
    withdraw: Callable[[], Awaitable[None]],
) -> None:
    """Signal a job's script until it runs no more, for some seconds: whoever then cancels it does so without KillWait.

    A job is said to run before its script does, and a signal to it is lost then. Cancelled in that moment it would get
    its SIGTERM first, and stay for KillWait. One that waits is withdrawn, and looked at again: it may start just then.
    One that is ending already is left alone.
    """
    for pause_s in _PAUSES_S:
        job = await look()
        if job is None or job.state not in {State.PENDING, State.RUNNING} or job.is_completing:
            return
        await (withdraw() if job.state is State.PENDING else signal())
        await asyncio.sleep(pause_s)
