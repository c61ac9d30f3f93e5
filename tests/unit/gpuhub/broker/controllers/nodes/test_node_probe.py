"""The firewall of a node: a node without it takes no work, and says why."""

from __future__ import annotations

import asyncio

import pytest

from gpuhub.broker.controllers.nodes import node_probe
from gpuhub.broker.controllers.nodes.node_probe import FirewallChecker
from gpuhub.common.errors import GpuhubError, NodeUnreachable
from gpuhub.nodes.gpu_health import explain_node_unavailable
from gpuhub.nodes.status import NodeStatus

UP = NodeStatus(name="rig1", is_up=True, is_reconciled=True, daemon_id="d")


class FakeClock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class FakeNode:
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
def clock() -> FakeClock:
    return FakeClock()


async def test_firewall_check_interval_is_shorter_after_a_failure(clock: FakeClock) -> None:
    """What is in place is not asked for at every look."""
    node = FakeNode()
    watched = FirewallChecker(node.ensure, clock)  # type: ignore[arg-type]
    record = await watched.check(UP)
    record = await watched.check(record)
    assert (record, node.asked, explain_node_unavailable(record, None)) == (UP, 1, None)
    clock.now_s += node_probe.FIREWALL_CHECK_PERIOD_S
    node.error = GpuhubError("node rig1: its firewall is not in place: nft: no")
    record = await watched.check(record)
    assert (record.firewall_error, node.asked) == ("its firewall is not in place: nft: no", 2)
    assert explain_node_unavailable(record, None) == record.firewall_error
    node.error = None
    record = await watched.check(record)
    assert (record, node.asked) == (UP, 3)
    await watched.close()


async def test_unreachable_node_fails_the_firewall_check(clock: FakeClock) -> None:
    """And is asked at the next one."""
    node = FakeNode()
    node.error = NodeUnreachable("node rig1: silent")
    watched = FirewallChecker(node.ensure, clock)  # type: ignore[arg-type]
    for asked in (1, 2):
        with pytest.raises(NodeUnreachable):
            await watched.check(UP)
        assert node.asked == asked
    await watched.close()


async def test_slow_firewall_check_does_not_delay_probes(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """One question at a time; what it brings counts when it comes, and is given up at the end."""
    monkeypatch.setattr(node_probe, "FIREWALL_TIMEOUT_S", 0.01)
    node = FakeNode()
    node.gate.clear()
    node.error = GpuhubError("node rig1: no")
    watched = FirewallChecker(node.ensure, clock)  # type: ignore[arg-type]
    assert await watched.check(UP) == UP
    assert await watched.check(UP) == UP
    assert node.asked == 1
    node.gate.set()
    await asyncio.sleep(0)
    assert (await watched.check(UP)).firewall_error == "no"
    node.gate.clear()
    await watched.check(UP)
    await watched.close()
