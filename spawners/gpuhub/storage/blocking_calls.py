"""Threads for blocking calls that may hang forever, with a time limit for the caller.

A call into a dead file server cannot be interrupted: its thread remains until the server is back. Therefore each target
(a server, a folder) has a few separate threads, which block no other work and end with the process. While one of them
is overdue, further calls for the same target fail at once instead of hanging as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpuhub.common.errors import StorageUnavailable

#: Maximum number of threads of one target.
MAX_THREADS = 8

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Call:
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    outcome: asyncio.Future[Any]
    #: Monotonic time at which the caller stops waiting.
    deadline: float


@dataclass(slots=True)
class _Target:
    waiting: deque[_Call] = field(default_factory=deque)
    running: set[_Call] = field(default_factory=set)
    threads: int = 0


class BlockingCallPool:
    """Threads for calls that may hang, by target. Safe to use from several event loops."""

    def __init__(self, threads: int = MAX_THREADS) -> None:
        self._max_threads = threads
        self._targets: dict[str, _Target] = {}
        self._lock = threading.Lock()

    async def run(self, target: str, work: Callable[[], T], *, limit_s: float, timeout_message: str) -> T:
        """Run `work()` on a thread of the target and return its result.

        Args:
            timeout_message: Beginning of the error's text when the call does not end in time.

        Raises:
            StorageUnavailable: The call did not end within `limit_s` seconds, or an earlier call for the target is
                overdue.
        """
        loop = asyncio.get_running_loop()
        call = _Call(work, loop, loop.create_future(), time.monotonic() + limit_s)
        self._submit(target, call, timeout_message)
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the answer.
            async with asyncio.timeout(limit_s) as limit:
                result: T = await call.outcome
                return result
        except TimeoutError:
            if not limit.expired():
                raise  # by the work itself
            if not call.outcome.cancelled():
                # The answer came before this busy loop read the clock.
                in_time: T = call.outcome.result()
                return in_time
            raise StorageUnavailable(f"{timeout_message} within {limit_s:.0f} s") from None
        finally:
            self._withdraw(target, call)

    def count_overdue(self, target: str) -> int:
        """Return the number of overdue threads of a target."""
        with self._lock:
            return self._count_overdue(self._targets.get(target) or _Target())

    def _submit(self, target: str, call: _Call, silent: str) -> None:
        with self._lock:
            calls = self._targets.setdefault(target, _Target())
            if self._count_overdue(calls):
                raise StorageUnavailable(f"{silent}: an earlier request to it has not ended")
            calls.waiting.append(call)
            if calls.threads >= self._max_threads:
                return
            calls.threads += 1
        # Daemon threads, because the interpreter would wait for an executor's threads when it ends.
        threading.Thread(target=self._run_calls, args=(target,), name=f"blocking calls {target}", daemon=True).start()

    def _withdraw(self, target: str, call: _Call) -> None:
        """Drop a call that its caller no longer waits for, unless it has begun."""
        with self._lock:
            calls = self._targets.get(target)
            if calls is not None and call in calls.waiting:
                calls.waiting.remove(call)

    def _run_calls(self, target: str) -> None:
        while (call := self._next_call(target)) is not None:
            try:
                result, error = call.work(), None
            except BaseException as raised:  # noqa: BLE001 - the waiting caller gets it
                result, error = None, raised
            with self._lock:
                self._targets[target].running.discard(call)
            with contextlib.suppress(RuntimeError):  # the event loop is closed, so no caller waits
                call.loop.call_soon_threadsafe(_set_outcome, call.outcome, result, error)

    def _next_call(self, target: str) -> _Call | None:
        with self._lock:
            calls = self._targets[target]
            if calls.waiting:
                call = calls.waiting.popleft()
                calls.running.add(call)
                return call
            calls.threads -= 1
            if not calls.threads:
                del self._targets[target]
            return None

    def _count_overdue(self, calls: _Target) -> int:
        now = time.monotonic()
        return sum(call.deadline < now for call in calls.running)


def _set_outcome(outcome: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if outcome.done():
        return
    if error is None:
        outcome.set_result(result)
    else:
        outcome.set_exception(error)
