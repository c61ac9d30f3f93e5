"""Blocking calls that may hang for ever: on threads of their own, waited for so long and no longer.

A call into a dead file server cannot be broken off: its thread stays until the server is back. So each place (a
server, a folder) has a few threads of its own, which hold nobody else's work up and end with the process; and while one
of them is overdue, further calls for its place fail at once instead of getting stuck beside it.
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

from gpuhub.errors import StorageUnavailable

#: Threads of one place at the most.
THREADS = 8

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Call:
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    outcome: asyncio.Future[Any]
    #: When nobody waits for it any more; monotonic.
    deadline: float


@dataclass(slots=True)
class _Place:
    waiting: deque[_Call] = field(default_factory=deque)
    running: set[_Call] = field(default_factory=set)
    threads: int = 0


class Patience:
    """Threads for calls that may hang, by place. Safe to use from several event loops."""

    def __init__(self, threads: int = THREADS) -> None:
        self._most = threads
        self._places: dict[str, _Place] = {}
        self._lock = threading.Lock()

    async def run(self, place: str, work: Callable[[], T], *, limit_s: float, silent: str) -> T:
        """What `work()` returns or raises; `silent` is said when it does not end in time, and nothing else follows.

        Raises:
            StorageUnavailable: it did not end within `limit_s`, or an earlier call for the place still has not.
        """
        loop = asyncio.get_running_loop()
        call = _Call(work, loop, loop.create_future(), time.monotonic() + limit_s)
        self._enter(place, call, silent)
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the answer.
            async with asyncio.timeout(limit_s):
                found: T = await call.outcome
                return found
        except TimeoutError:
            if call.outcome.done() and not call.outcome.cancelled():
                raise  # the work's own
            raise StorageUnavailable(f"{silent} within {limit_s:.0f} s") from None
        finally:
            self._leave(place, call)

    def stuck(self, place: str) -> int:
        """How many threads of a place are overdue."""
        with self._lock:
            return self._overdue(self._places.get(place) or _Place())

    def _enter(self, place: str, call: _Call, silent: str) -> None:
        with self._lock:
            known = self._places.setdefault(place, _Place())
            if self._overdue(known):
                raise StorageUnavailable(f"{silent}: an earlier question to it is still open")
            known.waiting.append(call)
            if known.threads >= self._most:
                return
            known.threads += 1
        # Daemon threads, made here: the interpreter would wait for those of an executor when it ends.
        threading.Thread(target=self._serve, args=(place,), name=f"patience {place}", daemon=True).start()

    def _leave(self, place: str, call: _Call) -> None:
        """Nobody waits for the call any more: if it was not begun, it never is."""
        with self._lock:
            known = self._places.get(place)
            if known is not None and call in known.waiting:
                known.waiting.remove(call)

    def _serve(self, place: str) -> None:
        while (call := self._next(place)) is not None:
            try:
                found, error = call.work(), None
            except BaseException as raised:  # noqa: BLE001 - it is raised again where it is waited for
                found, error = None, raised
            with self._lock:
                self._places[place].running.discard(call)
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it who waited
                call.loop.call_soon_threadsafe(_tell, call.outcome, found, error)

    def _next(self, place: str) -> _Call | None:
        with self._lock:
            known = self._places[place]
            if known.waiting:
                call = known.waiting.popleft()
                known.running.add(call)
                return call
            known.threads -= 1
            if not known.threads:
                del self._places[place]
            return None

    def _overdue(self, known: _Place) -> int:
        now = time.monotonic()
        return sum(call.deadline < now for call in known.running)


def _tell(outcome: asyncio.Future[Any], found: Any, error: BaseException | None) -> None:
    if outcome.done():
        return
    if error is None:
        outcome.set_result(found)
    else:
        outcome.set_exception(error)
