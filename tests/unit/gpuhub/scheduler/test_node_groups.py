"""Nodes that are restricted to groups: no way of placing a request leads to one that its owner may not use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuhub.common.gpu import GpuRequirement
from gpuhub.scheduler.interface import NodeCapacity, SchedulingParameters, SchedulingRequest
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
    slot,
)

VISION = frozenset({"vision"})
PREEMPTING = SchedulingParameters(preemption=True)


def build_nodes() -> list[NodeCapacity]:
    """Return n0 with two of the best cards, only for vision, and n1 with one of these, for all."""
    return [node("n0", BIG, BIG, groups=VISION), node("n1", BIG)]


@pytest.mark.parametrize(
    "request_",
    [
        ask("a", requirement=WANTS_BIG),
        ask("a", gpus_per_node=0),
        ask("a", share=2),
        ask("a", spread=1),
        ask("a", exclusive=True),
        ask("a", nodes=2, least_nodes=1),
        ask("a", groups=frozenset({"nlp"})),
    ],
)
def test_only_members_are_placed_on_a_node_with_groups(request_: SchedulingRequest) -> None:
    """Others get another node, or wait although its GPUs are free."""
    there = build_nodes()
    assert [share.node for share in build_scheduler(there, request_).decide(NOW).grants["a"].node_allocations] == ["n1"]
    alone = build_scheduler(there[:1], request_)
    assert alone.decide(NOW).grants == {}
    assert not alone.can_start_now(request_, NOW)
    assert alone.find_candidates(request_) == frozenset()
    member = replace(request_, groups=request_.groups | VISION)
    alone.put_request(member)
    assert alone.can_start_now(member, NOW)
    assert set(alone.decide(NOW).grants) == {"a"}


def test_equal_requests_of_members_and_others_are_served_apart() -> None:
    """The first that does not fit stops only those who may use the same nodes."""
    asks = [ask("a"), ask("b"), ask("c", groups=VISION), ask("d"), ask("e", groups=VISION)]
    decision = build_scheduler(build_nodes(), *asks).decide(NOW)
    assert {name: granted_gpus(decision, name) for name in decision.grants} == {
        "a": ["n1-0"],
        "c": ["n0-0"],
        "e": ["n0-1"],
    }


def test_a_gang_avoids_nodes_of_other_groups() -> None:
    """Whether it asks for nodes or for GPUs on any nodes."""
    there = [node(f"n{number}", BIG, groups=VISION if number < 2 else frozenset()) for number in range(4)]
    for request in (ask("a", nodes=2), ask("a", spread=2), ask("a", nodes=4, least_nodes=1)):
        assert granted_gpus(build_scheduler(there, request).decide(NOW), "a") == ["n2-0", "n3-0"]
    for request in (ask("a", nodes=3), ask("a", spread=3)):
        assert build_scheduler(there, request).decide(NOW).grants == {}
        member = replace(request, groups=VISION)
        assert set(build_scheduler(there, member).decide(NOW).grants) == {"a"}


def test_backfill_keeps_off_nodes_of_other_groups() -> None:
    """A short request is not put where it would delay nobody, and what others wait for does not count there."""
    there = build_nodes()
    held = hold(ask("h", time_limit_s=9 * HOUR), slot(there, "n1-0"))
    first = ask("a", requirement=WANTS_BIG)
    short = ask("b", requirement=WANTS_BIG, time_limit_s=60.0)
    made = build_scheduler(there, held, first, short)
    assert made.decide(NOW).grants == {}
    assert made.explain_pending("a", NOW).expected_start == NOW + 8 * HOUR
    made.put_request(ask("c", groups=VISION))
    assert set(made.decide(NOW).grants) == {"c"}


def test_first_request_of_other_groups_is_protected_as_well() -> None:
    """Enough requests that wait for a node of a group do not leave those for the open nodes unprotected."""
    there = [node("n0", BIG, groups=VISION), node("n1", BIG, BIG)]
    held = [
        hold(ask("h", groups=VISION), slot(there, "n0-0")),
        hold(ask("i", time_limit_s=2 * HOUR), slot(there, "n1-0")),
    ]
    members = [
        ask(f"m{number}", groups=VISION, requirement=WANTS_BIG, exclude=frozenset({"n1"})) for number in range(6)
    ]
    whole = ask("w", created_at=NOW, gpus_per_node=2)
    late = ask("x", created_at=NOW + 1)
    made = build_scheduler(there, *held, *members, whole, late)
    assert made.decide(NOW).grants == {}
    assert "requested earlier by others" in made.explain_pending("x", NOW).text


def test_preemption_ends_nothing_on_nodes_of_other_groups() -> None:
    """It would help only members, for whom it does."""
    there = build_nodes()
    scavenging = [
        hold(ask("s", scavenge=True, groups=VISION), slot(there, "n0-0")),
        hold(ask("t", scavenge=True, groups=VISION), slot(there, "n0-1")),
    ]
    kept = hold(ask("k"), slot(there, "n1-0"))
    for parts in ({}, {"spread": 1}):
        made = build_scheduler(there, *scavenging, kept, ask("a", **parts), rules=PREEMPTING)
        assert made.decide(NOW).preemptions == ()
        made.put_request(ask("b", groups=VISION, **parts))
        (preemption,) = made.decide(NOW).preemptions
        assert (preemption.for_request, preemption.nodes) == ("b", {"n0"})


def test_a_node_gets_groups_while_requests_wait() -> None:
    """Requests that were equal until then no longer are."""
    made = build_scheduler([], ask("a"), ask("b", groups=VISION))
    made.put_node(node("n0", BIG, groups=VISION))
    assert set(made.decide(NOW).grants) == {"b"}


THERE = {"n0": (BIG, BIG), "n1": (BIG,)}


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (
            ask("a", gpus_per_node=2),
            "2 × any GPU on one node was requested; none of the nodes other than n0 can provide it; the cluster has: "
            "n0 with 2 × RTX 5090 (31.8 GiB); n1 with 1 × RTX 5090 (31.8 GiB); only for members of vision: n0",
        ),
        (
            ask("a", nodes=2),
            "2 nodes were requested and the cluster has 1 other than n0: n1; only for members of vision: n0",
        ),
        (ask("a", exclude=frozenset({"zz"})), "there is no node 'zz' to exclude"),
        (
            ask("a", spread=3),
            "3 × any GPU on any nodes was requested; the nodes other than n0 have 1 such GPUs; the cluster has",
        ),
    ],
)
def test_requests_for_nodes_of_other_groups_are_refused_with_the_groups(request_: SchedulingRequest, text: str) -> None:
    """At once, as nothing would ever serve them; members may ask, and everybody may exclude such a node."""
    made = build_scheduler(build_nodes())
    assert (made.explain_infeasible(request_, THERE) or "").startswith(text)
    member = replace(request_, groups=VISION, exclude=frozenset())
    assert made.explain_infeasible(member, THERE) is None
    assert made.explain_infeasible(ask("a", exclude=frozenset({"n0"})), THERE) is None


def test_explanation_names_nodes_of_other_groups() -> None:
    """Only those that would do, and only to those who may not use them."""
    there = [*build_nodes(), node("n2", SMALL, groups=frozenset({"nlp", "ops"})), node("n3", MIDDLE, groups=VISION)]
    held = hold(ask("h"), slot(there, "n1-0"))
    held_too = hold(ask("i", groups=VISION), slot(there, "n0-0"), slot(there, "n0-1"))
    made = build_scheduler(there, held, held_too, ask("a", requirement=WANTS_BIG))
    assert made.explain_pending("a", NOW).text == (
        "1 × RTX 5090 on one node: held by h; only for members of vision: n0"
    )
    made.put_request(ask("b", requirement=WANTS_BIG, groups=VISION))
    assert made.explain_pending("b", NOW).text == "1 × RTX 5090 on one node: held by h, i"
    made.put_request(ask("c", requirement=GpuRequirement(models=("RTX 5060",))))
    assert made.explain_pending("c", NOW).text == (
        "1 × RTX 5060 on one node: no node currently has such GPUs; only for members of nlp or ops: n2"
    )
    closed = build_scheduler(there[:1], ask("a", gpus_per_node=0))
    assert closed.explain_pending("a", NOW).text == (
        "a place without GPU on one node: not free yet; only for members of vision: n0"
    )
