"""The end of asyncio's tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def cancel_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended; their results and errors are dropped."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


async def wait_for_first(*tasks: asyncio.Future[Any]) -> set[asyncio.Future[Any]]:
    """Wait until one of the tasks has ended, cancel the others, and return those that had ended by themselves."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_tasks(tasks)
    return done
