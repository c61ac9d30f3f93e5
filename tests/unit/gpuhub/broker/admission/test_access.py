"""Turns of the messages and parts of one user's streams."""

from __future__ import annotations

import asyncio
import time

from gpuhub.broker.admission.access import SMALL_PART, SMALL_PARTS, ConcurrencyLimiter


async def test_many_small_parts_of_one_user_wait() -> None:
    """Those of all streams together; large parts and other users do not wait, and have turns in between."""
    streams, count = ConcurrencyLimiter(), 400
    others = 0

    async def serve_others() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    async def send(owner: str, size: int, number: int) -> float:
        began = time.monotonic()
        for _ in range(number):
            await streams.take_turn(owner, size)
        return time.monotonic() - began

    task = asyncio.create_task(serve_others())
    try:
        each = round(SMALL_PARTS.burst) // 4 + count // 4
        waited_s = max(await asyncio.gather(*(send("ada", SMALL_PART - 1, each) for _ in range(4))))
        assert waited_s >= count / SMALL_PARTS.per_second - 0.05
        assert others >= each
        began = others
        await send("ada", SMALL_PART, count)
        assert others - began >= count
        await send("ben", 0, count)
        assert streams._small_parts.reserve("ben") == 0.0
    finally:
        task.cancel()
