"""Partitions: packets between the head node and a node are lost, late, or lost one way only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gpuhub.head.programs import HUB
from tests.faults.bed import Bed
from tests.support.product import wait_for

Figure = Callable[[str, float], None]

#: Nothing promises anything for longer than this, seconds: notebooks report, leases are looked at, within less.
LONG_S = 20.0
UNREACHABLE = {"unreachable", "down"}


@contextmanager
def cut(bed: Bed, node: str, figure: Figure) -> Iterator[float]:
    """No packet passes; begins when that was noticed, and ends when the node is used again."""
    with bed.dropped(node):
        began = time.monotonic()
        wait_for(lambda: bed.node(node).get("state") in UNREACHABLE, f"{node} is unreachable", 60)
        figure("detected_s", time.monotonic() - began)
        yield began
    healed = time.monotonic()
    wait_for(lambda: bed.node(node).get("state") == "up", f"{node} is up again", 90)
    figure("back_s", time.monotonic() - healed)


@pytest.mark.case("P1")
@pytest.mark.fast
def test_cut_off(bed: Bed, figure: Figure) -> None:
    """The lease stays, its GPU is not given to who waits for it, and the same container serves after it heals."""
    seen = bed.start("ada", "nb", "on2")
    lease = bed.lease_of("ada", "nb")
    with cut(bed, "rig2", figure) as began:
        bed.ask_start("ben", "nb", "on2")
        while time.monotonic() < began + LONG_S:
            assert bed.lease_of("ada", "nb")["state"] == "active"
            assert bed.lease_of("ben", "nb").get("state", "requested") == "requested"
            time.sleep(1)
        assert bed.gpu("rig2")["state"] == "unavailable"
    assert bed.lease_of("ada", "nb")["id"] == lease["id"]
    assert bed.container("ada", "nb") == seen
    assert bed.clients["ada"].is_ready("nb")


@pytest.mark.case("P2")
def test_cut_off_while_the_hub_restarts(bed: Bed, figure: Figure) -> None:
    """A hub that cannot ask keeps the server, and serves it when the node is back."""
    seen = bed.start("ada", "nb", "on2")
    with cut(bed, "rig2", figure):
        bed.kill_and_wait(HUB)
        time.sleep(5)
        assert bed.lease_of("ada", "nb")["state"] == "active"
        assert "nb" in (bed.clients["ada"].servers() or {})
    wait_for(lambda: bed.clients["ada"].is_ready("nb"), "ada's server is ready", 60)
    assert bed.container("ada", "nb") == seen


@pytest.mark.case("P3")
@pytest.mark.fast
def test_cut_off_stopped_and_started_elsewhere(bed: Bed, figure: Figure) -> None:
    """The old GPU is quarantined until its node proves that the container is gone; the new one is elsewhere."""
    old = bed.start("ada", "nb", "on2")
    with cut(bed, "rig2", figure):
        bed.stop("ada", "nb")
        wait_for(lambda: _states(bed, "ada") == ["quarantined"], "the old lease is quarantined", 60)
        new = bed.start("ada", "nb", "anygpu")
        assert new.node != "rig2"
        assert old.id in {seen.id for seen in bed.observer.running()}
    wait_for(lambda: _states(bed, "ada") == ["active"], "the old lease is proven gone", 60)
    assert old.id not in {seen.id for seen in bed.observer.running()}


def _states(bed: Bed, name: str) -> list[str]:
    return [row["state"] for row in bed.leases() or () if row["owner"] == name]


@pytest.mark.case("P4")
@pytest.mark.parametrize("how", ["one-way", "lossy", "late"])
def test_half_cut(bed: Bed, figure: Figure, how: str) -> None:
    """The node does not come and go, its notebook stays, and another node starts one as quickly as before."""
    seen = bed.start("ada", "nb", "on2")
    usual = _start_s(bed)
    first = bed.last_event()
    loss = ("-m", "statistic", "--mode", "random", "--probability", "0.3")
    ways = {
        "one-way": lambda: bed.dropped("rig2", ("INPUT",)),
        "lossy": lambda: bed.dropped("rig2", ("INPUT", *loss), ("OUTPUT", *loss)),
        "late": lambda: bed.trouble("rig2", ".", "delay", seconds=5.0),
    }
    with ways[how]():
        slowest = max(_start_s(bed) for _ in range(4))
        time.sleep(LONG_S)
        assert bed.lease_of("ada", "nb")["state"] == "active"
    turns = [event for event in bed.events("node.unreachable", "node.up", after=first) if event["node"] == "rig2"]
    figure(f"turns_{how}", len(turns))
    figure(f"start_elsewhere_{how}_s", slowest)
    figure("start_usual_s", usual)
    assert len(turns) <= 3, turns
    assert slowest < 3 * usual + 5
    wait_for(lambda: bed.node("rig2").get("state") == "up", "rig2 is up", 90)
    assert bed.container("ada", "nb") == seen


def _start_s(bed: Bed) -> float:
    """How long a start on another node takes."""
    began = time.monotonic()
    bed.start("ben", "other", "on3")
    took = time.monotonic() - began
    bed.stop("ben", "other")
    return took


@pytest.mark.case("P5")
@pytest.mark.parametrize("on", ["POST /containers/create", "POST /containers/[0-9a-f]+/start"], ids=["create", "start"])
def test_an_answer_is_lost(bed: Bed, on: str) -> None:
    """What was done and never heard of is removed or adopted; the next start has one container."""
    with bed.trouble("rig1", on, "deaf") as trouble:
        bed.ask_start("ada", "nb", "on1")
        trouble.wait_met()
        said = bed.failure("ada", "nb", 90)
        assert "rig1" in said
    wait_for(lambda: bed.leases() == [], "the lease has ended", 60)
    seen = bed.start("ada", "nb", "on1", 90)
    assert [one.id for one in bed.observer.running() if one.owner == "ada"] == [seen.id]
