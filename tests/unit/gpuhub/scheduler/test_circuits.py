"""Enforced circuits: GPUs in use draw no more than their circuit leaves, in every way of placing and planning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuhub.common.gpu import GpuRequirement, GpuSpec
from gpuhub.scheduler.interface import (
    CircuitUsage,
    NodeCapacity,
    Reservation,
    SchedulingParameters,
    SchedulingRequest,
)
from gpuhub.scheduler.scheduler import BuiltinScheduler
from tests.support.scheduler_snapshots import (
    BIG,
    HOUR,
    MIDDLE,
    NOW,
    SMALL,
    WANTS_BIG,
    ask,
    build_scheduler,
    granted_gpus,
    hold,
    node,
    on_circuit,
    slot,
)

WANTS_SMALL = GpuRequirement(models=("RTX 5060",))
MIG = GpuSpec(model="A100 1g.10gb", memory_mib=9856, is_mig=True)
PREEMPTING = SchedulingParameters(preemption=True)


def build_rigs(gpu_watts: int) -> list[NodeCapacity]:
    """Return n0 and n1 with one of the best cards each, and n2 with a small one."""
    return on_circuit(gpu_watts, node("n0", BIG), node("n1", BIG), node("n2", SMALL))


def explain(made: BuiltinScheduler, name: str) -> str:
    return made.explain_pending(name, NOW).text


def test_gpu_beyond_the_circuit_is_not_granted() -> None:
    """The second of two cards waits, a small one starts, and the first one's end lets the next start."""
    there = build_rigs(800)
    asks = [ask(name, requirement=WANTS_BIG) for name in ("a", "b")]
    made = build_scheduler(there, *asks, ask("c", requirement=WANTS_SMALL))
    assert set(made.decide(NOW).grants) == {"a", "c"}
    assert made.report_circuits()["left"].taken_watts == 720
    assert not made.can_start_now(ask("d", requirement=WANTS_BIG), NOW)
    made.remove("a", NOW)
    assert set(made.decide(NOW).grants) == {"b"}


def test_reason_names_circuit_and_watts() -> None:
    """What is left of how much, what is needed, and who has the rest."""
    there = build_rigs(1140)
    held = [hold(ask("h"), slot(there, "n0-0")), hold(ask("i"), slot(there, "n2-0"))]
    made = build_scheduler(there, *held, ask("a", requirement=WANTS_BIG))
    assert made.decide(NOW).grants == {}
    assert explain(made, "a") == (
        "1 × RTX 5090 on one node: circuit 'left' has 420 W of 1,140 W for GPUs left and 575 W are needed "
        "(taken by h, i); held by h"
    )


def test_without_circuits_or_with_enough_nothing_changes() -> None:
    there = build_rigs(1295)
    asks = [ask("a", requirement=WANTS_BIG), ask("b", requirement=WANTS_BIG), ask("c", requirement=WANTS_SMALL)]
    assert set(build_scheduler(there, *asks).decide(NOW).grants) == {"a", "b", "c"}
    assert build_scheduler([replace(supply, circuit=None) for supply in there]).report_circuits() == {}


def test_gpus_elsewhere_are_chosen_instead() -> None:
    """On another circuit, or on none, although the policy would prefer the least capable card."""
    there = [*on_circuit(300, node("n0", SMALL, MIDDLE)), *on_circuit(600, node("n1", BIG), name="right")]
    made = build_scheduler(there, hold(ask("h"), slot(there, "n0-1")), ask("a"))
    assert granted_gpus(made.decide(NOW), "a") == ["n1-0"]


@pytest.mark.parametrize(
    ("request_", "gpus"),
    [
        (ask("a", nodes=2), ["n1-0", "n2-0"]),
        (ask("a", nodes=3, least_nodes=1), ["n1-0", "n2-0"]),
        (ask("a", spread=2), ["n1-0", "n2-0"]),
        (ask("a", nodes=3), None),
        (ask("a", spread=3), None),
        (ask("a", gpus_per_node=2), None),
        (ask("a", exclusive=True), ["n2-0"]),
        (ask("a", gpus_per_node=0), []),
    ],
)
def test_gang_stays_within_its_circuit(request_: SchedulingRequest, gpus: list[str] | None) -> None:
    """It takes the nodes that need least, also where the policy would take others."""
    there = on_circuit(500, node("n0", BIG, BIG), node("n1", MIDDLE), node("n2", SMALL))
    made = build_scheduler(there, request_)
    decision = made.decide(NOW)
    assert (sorted(granted_gpus(decision, "a")) if decision.grants else None) == gpus


def test_gang_over_two_circuits_needs_both() -> None:
    there = [*on_circuit(600, node("n0", BIG)), *on_circuit(600, node("n1", BIG), node("n2", BIG), name="right")]
    gang = ask("a", nodes=2)
    assert granted_gpus(build_scheduler(there, gang).decide(NOW), "a") == ["n0-0", "n1-0"]
    made = build_scheduler(there, hold(ask("h"), slot(there, "n2-0")), gang)
    assert made.decide(NOW).grants == {}
    assert "circuit 'right' has 25 W of 600 W for GPUs left and 575 W are needed (taken by h)" in explain(made, "a")


def test_shares_and_mig_devices_count_their_gpu_once() -> None:
    """A part of a GPU that is in use already needs nothing more."""
    there = on_circuit(600, node("n0", BIG), node("n1", BIG))
    halves = [ask(name, share=2) for name in ("a", "b", "c")]
    assert set(build_scheduler(there, *halves).decide(NOW).grants) == {"a", "b"}
    mig = on_circuit(300, node("n0", MIG, MIG, MIG))
    devices = [
        replace(each, parent=f"gpu{min(each.index, 1)}") for each in mig[0].slots
    ]  # Two devices on one GPU: n0-1 and n0-2.
    there = [replace(mig[0], slots=tuple(devices))]
    made = build_scheduler(there, hold(ask("h"), there[0].slots[1]), ask("a"), ask("b"))
    assert [granted_gpus(made.decide(NOW), "a"), explain(made, "b")] == [
        ["n0-2"],
        "1 × any GPU on one node: circuit 'left' has 0 W of 300 W for GPUs left and 300 W are needed (taken by a, h); "
        "held by a, h",
    ]


@pytest.mark.parametrize("state", [{"is_ending": True}, {"is_quarantined": True}, {"shrinking": frozenset({"n0"})}])
def test_what_may_still_draw_power_counts(state: dict[str, Any]) -> None:
    """Until it is proven that the container is gone."""
    there = build_rigs(600)
    made = build_scheduler(there, hold(ask("h"), slot(there, "n0-0"), **state), ask("a", requirement=WANTS_BIG))
    assert made.decide(NOW).grants == {}
    made.remove("h", NOW)
    assert set(made.decide(NOW).grants) == {"a"}


def test_gpu_in_use_without_a_known_limit_takes_the_whole_circuit() -> None:
    """Its lease began when the limit was known."""
    there = build_rigs(1140)
    unknown = replace(there[0], slots=(replace(there[0].slots[0], watts=None, available=False),))
    held = hold(ask("h"), unknown.slots[0])
    made = build_scheduler([unknown, *there[1:]], held, ask("a", requirement=WANTS_SMALL))
    assert made.decide(NOW).grants == {}
    assert "circuit 'left' has 0 W of 1,140 W for GPUs left and 145 W are needed" in explain(made, "a")


def test_raised_limits_end_nothing_and_leave_nothing() -> None:
    there = build_rigs(600)
    made = build_scheduler(there, hold(ask("h"), slot(there, "n0-0")))
    made.put_node(replace(there[0], slots=(replace(there[0].slots[0], watts=700),)))
    made.put_request(ask("a", requirement=WANTS_SMALL))
    assert (made.decide(NOW).grants, made.report_circuits()["left"].taken_watts) == ({}, 700)
    assert "circuit 'left' has 0 W of 600 W" in explain(made, "a")


def test_start_is_planned_for_when_the_power_is_free() -> None:
    """A free GPU alone does not help; the earliest of several ends that suffice does."""
    there = on_circuit(800, node("n0", BIG), node("n1", BIG), node("n2", SMALL, SMALL))
    held = [
        hold(ask("h", time_limit_s=3 * HOUR), slot(there, "n0-0")),
        hold(ask("i", time_limit_s=2 * HOUR), slot(there, "n2-0")),
    ]
    made = build_scheduler(there, *held, ask("a", requirement=WANTS_BIG))
    assert made.decide(NOW).grants == {}
    assert made.explain_pending("a", NOW).expected_start == NOW + 2 * HOUR


def test_backfill_takes_no_power_that_an_earlier_request_counts_on() -> None:
    """Unless it ends before, or leaves enough."""
    there = on_circuit(800, node("n0", MIDDLE), node("n1", BIG), node("n2", SMALL, SMALL))
    held = hold(ask("h", time_limit_s=3 * HOUR), slot(there, "n0-0"))
    first = ask("a", requirement=WANTS_BIG, time_limit_s=5 * HOUR)
    small = [ask(name, requirement=WANTS_SMALL, time_limit_s=9 * HOUR) for name in ("b", "c")]
    made = build_scheduler(there, held, first, *small)
    assert set(made.decide(NOW).grants) == {"b"}
    assert made.explain_pending("a", NOW).expected_start == NOW + 2 * HOUR
    assert "circuit 'left' has 405 W of 800 W for GPUs left and 575 W are needed (taken by b, h)" in explain(made, "a")
    assert explain(made, "c") == "1 × RTX 5060 on one node: requested earlier by others; held by b"
    made.put_request(ask("d", requirement=WANTS_SMALL, time_limit_s=HOUR))
    assert set(made.decide(NOW).grants) == {"d"}


def test_without_backfill_the_first_request_keeps_the_power() -> None:
    there = build_rigs(800)
    held = hold(ask("h"), slot(there, "n2-0"))
    first = ask("a", requirement=WANTS_BIG)
    rules = SchedulingParameters(backfill=False)
    running = hold(ask("i"), slot(there, "n0-0"))
    made = build_scheduler(there, held, running, first, ask("b", requirement=WANTS_SMALL), rules=rules)
    made.remove("h", NOW)
    assert made.decide(NOW).grants == {}
    made.remove("i", NOW)
    assert set(made.decide(NOW).grants) == {"a", "b"}


def test_preemption_releases_power_on_other_nodes() -> None:
    """The GPU is free; a scavenging job on the circuit ends for its power, and none elsewhere."""
    there = [*build_rigs(800), node("n3", SMALL)]
    scavenging = [
        hold(ask("s", scavenge=True), slot(there, "n0-0")),
        hold(ask("t", scavenge=True), slot(there, "n3-0")),
        hold(ask("u", scavenge=True), slot(there, "n2-0")),
    ]
    for shape in ({}, {"spread": 1}):
        waiting = ask("a", requirement=WANTS_BIG, exclude=frozenset({"n0"}), **shape)
        made = build_scheduler(there, *scavenging, waiting, rules=PREEMPTING)
        (preemption,) = made.decide(NOW).preemptions
        assert (preemption.allocation_id, preemption.for_request) == ("s", "a")
        assert made.decide(NOW).preemptions == ()
        made.remove("s", NOW)
        assert set(made.decide(NOW).grants) == {"a"}


def test_reservation_keeps_the_power_of_its_gpus() -> None:
    """Others may use the circuit's rest; the reason names the reservation."""
    there = build_rigs(800)
    reservation = Reservation(
        id="v",
        name="course",
        uuids=frozenset({"n0-0"}),
        users=frozenset({"c"}),
        groups=frozenset(),
        starts_at=NOW + HOUR,
        ends_at=NOW + 3 * HOUR,
    )
    asks = [ask("a", requirement=WANTS_BIG, exclude=frozenset({"n0"})), ask("b", requirement=WANTS_SMALL)]
    made = build_scheduler(there, *asks, reservations=[reservation])
    assert set(made.decide(NOW).grants) == {"b"}
    assert "reserved from 1970-01-12 14:46 UTC until 1970-01-12 16:46 UTC: course" in explain(made, "a")
    made.put_request(ask("c", requirement=WANTS_BIG, time_limit_s=HOUR))
    assert set(made.decide(NOW).grants) == {"c"}


def test_sleeping_node_is_only_woken_if_its_circuit_suffices() -> None:
    there = build_rigs(600)
    asleep = replace(there[1], takes_work=False)
    made = build_scheduler([there[0], asleep, there[2]], hold(ask("h"), slot(there, "n0-0")), ask("a"))
    assert made.find_startable([there[1]], NOW) == frozenset()
    made.remove("h", NOW)
    made.put_node(replace(there[0], takes_work=False))
    made.put_node(replace(there[2], takes_work=False))
    assert made.find_startable([there[1]], NOW) == {"a"}


def test_usage_lists_unused_gpus_that_cannot_be_supplied() -> None:
    there = build_rigs(800)
    made = build_scheduler(there, hold(ask("h"), slot(there, "n0-0")))
    assert made.report_circuits() == {
        "left": CircuitUsage(
            taken_watts=575,
            gpu_watts=800,
            uuids=frozenset({"n0-0", "n1-0", "n2-0"}),
            unsupplied=frozenset({"n1-0"}),
        )
    }


CARDS = {"n0": (BIG, BIG), "n1": (BIG,), "n2": (SMALL,)}


@pytest.mark.parametrize(
    ("gpu_watts", "request_", "text"),
    [
        (
            800,
            ask("a", gpus_per_node=2),
            "2 × any GPU on one node was requested, and needs 1,150 W of circuit 'left', which leaves 800 W to GPUs; "
            "possible is: 1 × any GPU on one node",
        ),
        (
            800,
            ask("a", requirement=WANTS_BIG, nodes=2),
            "1 × RTX 5090 on each of 2 nodes was requested, and needs 1,150 W of circuit 'left', which leaves 800 W to "
            "GPUs; possible is: 1 × RTX 5090 on one node",
        ),
        (
            800,
            ask("a", spread=3),
            "3 × any GPU on any nodes was requested, and needs 1,295 W of circuit 'left', which leaves 800 W to GPUs; "
            "possible is: 2 × any GPU on any nodes",
        ),
        (
            500,
            ask("a", requirement=WANTS_BIG),
            "1 × RTX 5090 on one node was requested, and needs 575 W of circuit 'left', which leaves 500 W to GPUs; "
            "possible are: RTX 5060 (145 W)",
        ),
        (
            100,
            ask("a"),
            "1 × any GPU on one node was requested, and needs 145 W of circuit 'left', which leaves 100 W to GPUs; "
            "ask the administrator for a lower power limit of the GPUs",
        ),
    ],
)
def test_request_beyond_an_empty_circuit_is_refused(gpu_watts: int, request_: SchedulingRequest, text: str) -> None:
    """At once, with what would work; where a node or its GPUs are not known yet, it may wait."""
    there = on_circuit(gpu_watts, node("n0", BIG, BIG), node("n1", BIG), node("n2", SMALL))
    made = build_scheduler(there)
    assert made.explain_infeasible(request_, CARDS) == text
    assert made.explain_infeasible(request_, {**CARDS, "n3": None}) is None
    assert made.explain_infeasible(ask("a", gpus_per_node=0), CARDS) is None
    enough = build_scheduler(on_circuit(1295, *there))
    assert enough.explain_infeasible(request_, CARDS) is None


def test_candidates_are_gpus_that_the_circuit_could_supply() -> None:
    made = build_scheduler(build_rigs(500))
    assert made.find_candidates(ask("a")) == {"n2-0"}
