"""Calls that may hang run on separate threads with a time limit."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhub.common.errors import StorageUnavailable
from gpuhub.storage.blocking_calls import BlockingCallPool
from tests.support.broker.in_process import until

SILENT = "The disk does not answer"


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Return an event that hung calls wait for; it is set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


async def run_call(pool: BlockingCallPool, work: object, place: str = "disk", limit_s: float = 30) -> object:
    return await pool.run(place, work, limit_s=limit_s, timeout_message=SILENT)  # type: ignore[arg-type]


async def test_blocking_call_returns_its_result_or_exception() -> None:
    """The work's own TimeoutError is not taken for the time limit."""

    def fail() -> None:
        raise TimeoutError("mine")

    pool = BlockingCallPool()
    assert await run_call(pool, lambda: 7) == 7
    with pytest.raises(TimeoutError, match="mine"):
        await run_call(pool, fail)
    with pytest.raises(ZeroDivisionError):
        await run_call(pool, lambda: 1 // 0)


async def test_calls_after_a_hanging_one_fail_at_once(released: threading.Event) -> None:
    """Until the hung one returns; other places are not touched."""
    pool = BlockingCallPool()
    with pytest.raises(StorageUnavailable, match="does not answer within 1 s"):
        await run_call(pool, released.wait, limit_s=1)
    began = time.monotonic()
    with pytest.raises(StorageUnavailable, match="an earlier request to it has not ended"):
        await run_call(pool, lambda: 1)
    assert time.monotonic() - began < 5
    assert await run_call(pool, lambda: "other", place="another") == "other"
    assert pool.count_overdue("disk") == 1
    released.set()
    await until(lambda: not pool.count_overdue("disk"), "the hung calls end")
    assert await run_call(pool, lambda: 2) == 2


async def test_threads_of_each_path_are_limited(released: threading.Event) -> None:
    """Of many calls only the allowed number hangs, all fail in time, and calls that had not begun never run."""
    begun: list[int] = []

    def hang(number: int) -> None:
        begun.append(number)
        released.wait()

    pool = BlockingCallPool(threads=3)
    calls = [run_call(pool, lambda number=number: hang(number), limit_s=1.5) for number in range(20)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, StorageUnavailable) for outcome in outcomes)
    assert len(begun) == pool.count_overdue("disk") == 3
    released.set()
    await until(lambda: not pool.count_overdue("disk"), "the hung calls end")
    await run_call(pool, lambda: 1)
    assert len(begun) == 3


async def test_cancelled_call_does_not_count_as_hanging(released: threading.Event) -> None:
    """Cancelling does not count as hanging before the deadline."""
    pool = BlockingCallPool()
    task = asyncio.ensure_future(run_call(pool, released.wait))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await run_call(pool, lambda: 3) == 3


async def test_blocking_file_does_not_delay_other_calls(tmp_path: Path) -> None:
    """A real blocking system call: a FIFO without a writer; the loop and asyncio's own threads continue."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pool = BlockingCallPool()
    waiting = [asyncio.ensure_future(run_call(pool, fifo.read_bytes, limit_s=0.5)) for _ in range(4)]
    assert await asyncio.to_thread(lambda: "free") == "free"
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {StorageUnavailable}
    # One writer lets all readers continue, which then read the end.
    os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    await until(lambda: not pool.count_overdue("disk"), "the readers end")
    assert await run_call(pool, lambda: 4) == 4


def test_call_may_end_after_its_event_loop_is_closed(released: threading.Event) -> None:
    """A call may outlive who waited for it."""
    pool = BlockingCallPool()
    with pytest.raises(StorageUnavailable):
        asyncio.run(run_call(pool, released.wait, limit_s=1))  # type: ignore[arg-type]
    released.set()
    while pool.count_overdue("disk"):
        time.sleep(0.01)
    assert asyncio.run(run_call(pool, lambda: 5)) == 5  # type: ignore[arg-type]


async def test_answer_in_time_counts_on_a_busy_event_loop() -> None:
    """The loop sees the answer and the end of the time at once, since something held it up for longer than that."""
    answering = asyncio.ensure_future(
        BlockingCallPool().run("/srv", lambda: "there", limit_s=0.1, timeout_message="/srv does not answer")
    )
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251
    assert await answering == "there"
