"""The broker's processor time for an explanation why a request waits, in the longest queue that one user may make."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gpuhub.domain.models import Identity
from tests.support.broker.full_queue import full_queue
from tests.support.broker.in_process import Setting

EXPLANATIONS = 200


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield the figures of explanations."""
    times = asyncio.run(_explain())
    yield "broker.why_p50_ms", statistics.median(times) * 1e3, "ms"
    yield "broker.why_p99_ms", statistics.quantiles(times, n=100)[98] * 1e3, "ms"


async def _explain() -> list[float]:
    """Return the processor time of explanations of requests all over the queue, each for another caller, seconds."""
    times = []
    with tempfile.TemporaryDirectory() as folder:
        async with full_queue(Setting(Path(folder))) as (running, jobs):
            waiting = [job["lease"]["id"] for job in jobs if job["state"] == "waiting"]
            for number in range(EXPLANATIONS):
                lease = waiting[(len(waiting) - 1) * number // (EXPLANATIONS - 1)]
                caller = Identity(name=f"admin{number}", is_admin=True)
                begin = time.thread_time()
                await running.app.state.broker.why(caller, lease)
                times.append(time.thread_time() - begin)
    return times
