"""The time that work takes of the event loop, which serves everybody.

Processor time of the loop's thread is measured, not time on a clock: what else runs on the machine does not count.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

#: Longest single step, during which nothing else is served; seconds of processor time.
MAX_STEP_S = 0.1


@dataclass(slots=True)
class LoopTime:
    """Processor time of the event loop, seconds."""

    longest_step_s: float = 0.0
    #: Of all steps that were ready at the same time.
    longest_turn_s: float = 0.0
    total_s: float = 0.0


@contextmanager
def measured_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopTime]:
    """Measure every callback and every turn of the event loop."""
    found = LoopTime()

    def measure(run: Callable[[Any], None], record: Callable[[float], None]) -> Callable[[Any], None]:
        def run_measured(self: Any) -> None:
            began = time.thread_time()
            run(self)
            record(time.thread_time() - began)

        return run_measured

    def record_step(step_s: float) -> None:
        found.total_s += step_s
        found.longest_step_s = max(found.longest_step_s, step_s)

    def record_turn(turn_s: float) -> None:
        found.longest_turn_s = max(found.longest_turn_s, turn_s)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", measure(asyncio.Handle._run, record_step))
        run_once = asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]
        patch.setattr(asyncio.BaseEventLoop, "_run_once", measure(run_once, record_turn))
        yield found


@contextmanager
def kept_memory() -> Iterator[None]:
    """Leave out of the garbage collections within steps what this test and others have in memory."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
