"""Network partitions: packets between the head node and a node are lost, late, or lost in one direction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gpuhub.ops.deploy.programs import HUB
from tests.faults.testbed.testbed import FaultTestbed
from tests.support.product import wait_for

Figure = Callable[[str, float], None]

#: Heartbeats and lease checks have shorter intervals than this, seconds.
LONG_S = 20.0
#: Longest start while one of the nodes that keep users' networks does not answer, or has just come back, seconds.
START_S = 260.0
UNREACHABLE = {"unreachable", "down"}


@contextmanager
def partition(testbed: FaultTestbed, node: str, figure: Figure) -> Iterator[float]:
    """Drop all packets; enters when the node counts as unreachable, and leaves when it is used again."""
    with testbed.dropped(node):
        began = time.monotonic()
        wait_for(lambda: testbed.node(node).get("state") in UNREACHABLE, f"{node} is unreachable", 60)
        figure("detected_s", time.monotonic() - began)
        yield began
    healed = time.monotonic()
    wait_for(lambda: testbed.node(node).get("state") == "up", f"{node} is up again", 90)
    figure("back_s", time.monotonic() - healed)


@pytest.mark.case("P1")
@pytest.mark.fast
def test_node_is_partitioned(testbed: FaultTestbed, figure: Figure) -> None:
    """The lease stays, its GPU is not granted to a waiting user, and the same container serves after the repair."""
    seen = testbed.start("ada", "nb", "on2")
    lease = testbed.lease_of("ada", "nb")
    with partition(testbed, "rig2", figure) as began:
        testbed.ask_start("ben", "nb", "on2")
        while time.monotonic() < began + LONG_S:
            assert testbed.lease_of("ada", "nb")["state"] == "active"
            assert testbed.lease_of("ben", "nb").get("state", "requested") == "requested"
            time.sleep(1)
        assert testbed.gpu("rig2")["state"] == "unavailable"
    assert testbed.lease_of("ada", "nb")["id"] == lease["id"]
    assert testbed.container("ada", "nb") == seen
    assert testbed.clients["ada"].is_ready("nb")


@pytest.mark.case("P2")
def test_node_is_partitioned_while_the_hub_restarts(testbed: FaultTestbed, figure: Figure) -> None:
    """The restarted hub keeps the server, and serves it when the node returns."""
    seen = testbed.start("ada", "nb", "on2")
    with partition(testbed, "rig2", figure):
        testbed.kill_and_wait(HUB)
        time.sleep(5)
        assert testbed.lease_of("ada", "nb")["state"] == "active"
        assert "nb" in (testbed.clients["ada"].servers() or {})
    wait_for(lambda: testbed.clients["ada"].is_ready("nb"), "ada's server is ready", 60)
    assert testbed.container("ada", "nb") == seen


@pytest.mark.case("P3")
def test_stop_on_a_partitioned_node_and_start_on_another(testbed: FaultTestbed, figure: Figure) -> None:
    """The old GPU is quarantined until its node proves that the container is gone; the new one is on another node.

    The node is the first, which keeps users' networks with two others: a new user's is made without it.
    """
    old = testbed.start("ada", "nb", "on1", START_S)
    with partition(testbed, "rig1", figure):
        testbed.stop("ada", "nb")
        wait_for(lambda: _states(testbed, "ada") == ["quarantined"], "the old lease is quarantined", 60)
        began = time.monotonic()
        nodes = {testbed.start(user, "nb", "anygpu", START_S).node for user in ("ada", "ben")}
        figure("two_starts_elsewhere_s", time.monotonic() - began)
        assert nodes == {"rig2", "rig3"}
        assert old.id in {seen.id for seen in testbed.observer.running()}
    wait_for(lambda: _states(testbed, "ada") == ["active"], "the old lease is proven gone", 60)
    assert old.id not in {seen.id for seen in testbed.observer.running()}


def _states(testbed: FaultTestbed, name: str) -> list[str]:
    return [row["state"] for row in testbed.leases() or () if row["owner"] == name]


#: A manager of the Swarm that hears nothing of the others, or little, makes them vote again and again; meanwhile no
#: network is joined. Seconds.
ELECTION_S = 30.0


@pytest.mark.case("P4")
@pytest.mark.parametrize("how", ["one-way", "lossy", "late"])
def test_unreliable_network_to_a_node(testbed: FaultTestbed, figure: Figure, how: str) -> None:
    """The node's state changes rarely, its notebook stays, and another node starts one within a bound."""
    seen = testbed.start("ada", "nb", "on2")
    usual = _measure_start_s(testbed)
    first = testbed.last_event()
    loss = ("-m", "statistic", "--mode", "random", "--probability", "0.3")
    ways = {
        "one-way": lambda: testbed.dropped("rig2", ("INPUT",)),
        "lossy": lambda: testbed.dropped("rig2", ("INPUT", *loss), ("OUTPUT", *loss)),
        "late": lambda: testbed.fault("rig2", ".", "delay", seconds=5.0),
    }
    with ways[how]():
        slowest = max(_measure_start_s(testbed) for _ in range(4))
        time.sleep(LONG_S)
        assert testbed.lease_of("ada", "nb")["state"] == "active"
    turns = [event for event in testbed.events("node.unreachable", "node.up", after=first) if event["node"] == "rig2"]
    figure(f"turns_{how}", len(turns))
    figure(f"start_elsewhere_{how}_s", slowest)
    figure("start_usual_s", usual)
    assert len(turns) <= 3, turns
    assert slowest < 3 * usual + 5 + (0 if how == "late" else ELECTION_S)
    wait_for(lambda: testbed.node("rig2").get("state") == "up", "rig2 is up", 90)
    assert testbed.container("ada", "nb") == seen


def _measure_start_s(testbed: FaultTestbed) -> float:
    """Return the seconds that a start on another node takes."""
    began = time.monotonic()
    testbed.start("ben", "other", "on3")
    took = time.monotonic() - began
    testbed.stop("ben", "other")
    return took


@pytest.mark.case("P5")
@pytest.mark.parametrize("on", ["POST /containers/create", "POST /containers/[0-9a-f]+/start"], ids=["create", "start"])
def test_lost_response_of_a_container_creation(testbed: FaultTestbed, on: str) -> None:
    """A container whose creation got no response is removed or adopted; the next start has one container."""
    with testbed.fault("rig1", on, "drop_response") as fault:
        testbed.ask_start("ada", "nb", "on1")
        fault.wait_matched()
        message = testbed.wait_failed("ada", "nb", 90)
        assert "rig1" in message
    wait_for(lambda: testbed.leases() == [], "the lease has ended", 60)
    seen = testbed.start("ada", "nb", "on1", 90)
    assert [container.id for container in testbed.observer.running() if container.owner == "ada"] == [seen.id]
