"""Starts of containers wait for each other, node by node."""

from __future__ import annotations

import asyncio

from gpuhub.docker.start_slots import StartSlots


async def test_starts_of_a_node_wait_in_order_and_those_of_others_do_not() -> None:
    """The third start waits, says so once, and runs when one of the first two ends."""
    slots, started, told = StartSlots(per_node=2), [], []
    end = {name: asyncio.Event() for name in ("a1", "a2", "a3", "a4", "b1")}

    async def start(name: str) -> None:
        async with slots.hold(f"rig-{name[0]}", lambda: told.append(name)):
            started.append(name)
            await end[name].wait()

    tasks = [asyncio.create_task(start(name)) for name in end]
    await asyncio.sleep(0)
    assert (started, told) == (["a1", "a2", "b1"], ["a3", "a4"])
    end["a2"].set()
    await tasks[1]
    await asyncio.sleep(0)
    assert started[3:] == ["a3"]
    for event in end.values():
        event.set()
    await asyncio.gather(*tasks)
    assert started[4:] == ["a4"]
    assert told == ["a3", "a4"]


async def test_a_slot_is_released_once_whoever_comes_first() -> None:
    """A server that never answers gives its slot to the next start; its own end changes nothing."""
    slots, second = StartSlots(per_node=1), asyncio.Event()

    async def start_second() -> None:
        async with slots.hold("rig1", second.clear):
            second.set()

    async with slots.hold("rig1", second.clear) as slot:
        task = asyncio.create_task(start_second())
        slot.release_later(0)
        await asyncio.wait_for(second.wait(), 10)
        await task
    assert not slots._semaphores["rig1"].locked()
    async with slots.hold("rig1", second.clear):
        assert slots._semaphores["rig1"].locked()


async def test_a_cancelled_wait_takes_no_slot() -> None:
    """Whoever cancels a start that waits does not keep the others waiting."""
    slots = StartSlots(per_node=1)

    async def wait() -> None:
        async with slots.hold("rig1", lambda: None):
            raise AssertionError("has a slot")

    async with slots.hold("rig1", lambda: None):
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert not slots._semaphores["rig1"].locked()
