"""Work on many rows in slices, between which the event loop serves others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

#: Processor time after which others are served, seconds.
SLICE_S = 0.01


async def collect(items: Iterable[T]) -> list[T]:
    """Return all items of a lazy iterable; others are served after each item that ends a slice."""
    collected: list[T] = []
    began = time.thread_time()
    for item in items:
        collected.append(item)
        if time.thread_time() - began >= SLICE_S:
            await asyncio.sleep(0)
            began = time.thread_time()
    return collected
