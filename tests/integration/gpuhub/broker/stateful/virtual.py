"""Virtual time: an event loop without threads, whose clock advances only when nothing else is ready to run."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gpuhub.domain.clock import Clock

#: 21 November 2026, so that times in failures read like times.
EPOCH = 1_795_000_000.0


class _SkippingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type] # it depends on the system
    """Returns at once, and records how long it would have waited."""

    skip: Callable[[float], None]

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "every task waits for an event that never occurs"
            # Slightly more than requested, so that rounding never stops just before a timer.
            self.skip(timeout + 1e-6 if timeout > 0 else 0.0)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer. Work that uses threads elsewhere runs in the loop, a little
    later.
    """

    def __init__(self, seed: int) -> None:
        selector = _SkippingSelector()
        selector.skip = self._skip
        self._virtual = 0.0
        super().__init__(selector)
        self.chance = random.Random(seed)
        self.set_default_executor(_LoopExecutor(self))

    def time(self) -> float:
        return self._virtual

    def latency(self) -> float:
        """The duration of one external step, seconds."""
        return self.chance.uniform(0.0005, 0.01)

    def _skip(self, seconds: float) -> None:
        self._virtual += seconds


class _LoopExecutor(ThreadPoolExecutor):
    """Runs work in the loop itself after a delay, so that other tasks run between a request and its response."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(1)
        self._loop = loop

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._loop.call_later(self._loop.latency(), self._run, future, lambda: fn(*args, **kwargs))
        return future

    def _run(self, future: Future[Any], work: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - as with a thread's executor, the caller gets it
            future.set_exception(error)
        else:
            self._loop.call_later(self._loop.latency(), future.set_result, result)


class VirtualClock(Clock):
    """The clock of one process: the loop's time, and the machine's clock with the offset `skew`."""

    def __init__(self, loop: VirtualLoop, skew: Callable[[], float]) -> None:
        self._loop = loop
        self._skew = skew
        super().__init__()

    def wall(self) -> float:
        return EPOCH + self._loop.time() + self._skew()

    def monotonic(self) -> float:
        return self._loop.time()
