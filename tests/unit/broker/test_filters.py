"""A node without its packet filter takes no work, and says why."""

from __future__ import annotations

import asyncio

import pytest

from gpuhub.broker import filters
from gpuhub.broker.filters import Filters
from gpuhub.errors import GpuhubError, NodeUnreachable
from gpuhub.nodes.health import why_no_work
from gpuhub.nodes.records import NodeRecord

UP = NodeRecord(name="rig1", is_up=True, is_settled=True, daemon_id="d")


class Moment:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class Node:
    """What asking a node brings."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def ensure(self, name: str) -> None:
        assert name == "rig1"
        self.asked += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def clock() -> Moment:
    return Moment()


async def test_a_node_is_asked_now_and_then_and_soon_again_after_a_failure(clock: Moment) -> None:
    """What is in place is not asked for at every look."""
    node = Node()
    watched = Filters(node.ensure, clock)  # type: ignore[arg-type]
    record = await watched.judge(UP)
    record = await watched.judge(record)
    assert (record, node.asked, why_no_work(record, None)) == (UP, 1, None)
    clock.now_s += filters.PERIOD_S
    node.error = GpuhubError("node rig1: its packet filter is not in place: nft: no")
    record = await watched.judge(record)
    assert (record.filter_trouble, node.asked) == ("its packet filter is not in place: nft: no", 2)
    assert why_no_work(record, None) == record.filter_trouble
    node.error = None
    record = await watched.judge(record)
    assert (record, node.asked) == (UP, 3)
    await watched.close()


async def test_a_node_that_does_not_answer_has_failed_its_look(clock: Moment) -> None:
    """And is asked at the next one."""
    node = Node()
    node.error = NodeUnreachable("node rig1: silent")
    watched = Filters(node.ensure, clock)  # type: ignore[arg-type]
    for asked in (1, 2):
        with pytest.raises(NodeUnreachable):
            await watched.judge(UP)
        assert node.asked == asked
    await watched.close()


async def test_a_slow_node_holds_up_no_look(clock: Moment, monkeypatch: pytest.MonkeyPatch) -> None:
    """One question at a time; what it brings counts when it comes, and is given up at the end."""
    monkeypatch.setattr(filters, "WAIT_S", 0.01)
    node = Node()
    node.gate.clear()
    node.error = GpuhubError("node rig1: no")
    watched = Filters(node.ensure, clock)  # type: ignore[arg-type]
    assert await watched.judge(UP) == UP
    assert await watched.judge(UP) == UP
    assert node.asked == 1
    node.gate.set()
    await asyncio.sleep(0)
    assert (await watched.judge(UP)).filter_trouble == "no"
    node.gate.clear()
    await watched.judge(UP)
    await watched.close()
