"""Requests that start at the same moment or not at all: where they fit, what waits for them, and what they preempt."""

from __future__ import annotations

import pytest

from gpuhub.common.gpu import GpuRequirement
from gpuhub.scheduler.interface import Quota, QuotaLimits, SchedulerSnapshot, SchedulingParameters, SchedulingRequest
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
    hold,
    node,
    nodes,
    on_circuit,
)

CLUSTER = nodes([BIG], [MIDDLE], [SMALL])
CARDS = {node.name: [slot.card for slot in node.slots] for node in CLUSTER}


def ask_together(name: str, **parts: object) -> SchedulingRequest:
    """Return a request of the bundle `pair`, whose owner is ada."""
    return ask(name, **{"owner": "ada", "bundle": "pair", "time_limit_s": HOUR, **parts})


def build(*requests: SchedulingRequest, **parts: object) -> BuiltinScheduler:
    parameters = SchedulingParameters(preemption=bool(parts.pop("preemption", False)))
    scheduler = BuiltinScheduler(parameters)
    scheduler.rebuild(SchedulerSnapshot(**{"nodes": CLUSTER, "requests": requests, **parts}))
    return scheduler


def test_both_start_or_neither() -> None:
    """One of two fits, and waits for the other one; when a GPU is released, both are granted in one decision."""
    held = hold(ask("z", time_limit_s=2 * HOUR), CLUSTER[0].slots[0])
    scheduler = build(ask_together("a", requirement=WANTS_BIG), ask_together("b"), allocations=[held])
    assert scheduler.decide(NOW).grants == {}
    assert scheduler.explain_pending("a", NOW).expected_start == NOW + HOUR
    reason = scheduler.explain_pending("b", NOW)
    assert reason.expected_start == NOW + HOUR
    assert reason.text.endswith("; it starts together with the other 1 of its job group")
    scheduler.remove("z", NOW)
    assert scheduler.decide(NOW).grants.keys() == {"a", "b"}


def test_two_bundles_never_hold_half_each() -> None:
    """With three GPUs, two bundles of two run one after the other; a request that ends before the second starts passes."""
    scheduler = build(
        ask_together("a"),
        ask_together("b"),
        ask_together("c", bundle="other"),
        ask_together("d", bundle="other"),
        ask("e", time_limit_s=2 * HOUR),
        ask("f", time_limit_s=HOUR / 2),
    )
    granted = scheduler.decide(NOW).grants
    assert granted.keys() == {"a", "b", "f"}
    scheduler.remove("a", NOW)
    assert scheduler.decide(NOW).grants == {}
    scheduler.remove("b", NOW)
    assert scheduler.decide(NOW).grants.keys() == {"c", "d"}


def test_the_one_with_fewer_cards_chooses_first() -> None:
    """One that accepts any card leaves the RTX 5090 to the one that needs it, in whatever order they were made."""
    scheduler = build(ask_together("a", nodes=2), ask_together("b", requirement=WANTS_BIG))
    granted = scheduler.decide(NOW).grants
    assert {name: sorted(part.node for part in grant.node_allocations) for name, grant in granted.items()} == {
        "a": ["n1", "n2"],
        "b": ["n0"],
    }


def test_quota_counts_them_together() -> None:
    """Where the owner may hold one GPU, a bundle of two waits, says why, and keeps no GPU from others."""
    quotas = {"ada": Quota(per_user=QuotaLimits(max_gpus=1))}
    scheduler = build(ask_together("a"), ask_together("b"), ask("c"), ask("d"), ask("e"), quotas=quotas)
    assert scheduler.explain_pending("a", NOW).text == "ada holds 0 of at most 1 GPUs and asks for 2 more"
    assert scheduler.decide(NOW).grants.keys() == {"c", "d", "e"}


def test_preemption_only_where_all_start() -> None:
    """Scavengers are preempted for both of a bundle, and none of them where another allocation blocks one."""
    scavengers = [hold(ask(name, scavenge=True), node.slots[0]) for name, node in zip("xy", CLUSTER[:2], strict=True)]
    free = build(ask_together("a"), ask_together("b"), ask_together("c"), allocations=scavengers, preemption=True)
    decision = free.decide(NOW)
    assert {one.allocation_id for one in decision.preemptions} == {"x", "y"}
    assert decision.grants == {}
    free.remove("x", NOW)
    assert free.decide(NOW).grants == {}
    free.remove("y", NOW)
    assert free.decide(NOW).grants.keys() == {"a", "b", "c"}

    scavengers[1] = hold(ask("y", time_limit_s=3 * HOUR), CLUSTER[1].slots[0])
    blocked = build(ask_together("a"), ask_together("b"), ask_together("c"), allocations=scavengers, preemption=True)
    assert blocked.decide(NOW).preemptions == ()
    assert blocked.explain_pending("a", NOW).expected_start == NOW + 2 * HOUR


def test_what_never_fits_together_is_named() -> None:
    """Each fits, but both want the only RTX 5090; unknown GPUs of a node may be the missing ones."""
    pair = [ask_together(name, requirement=WANTS_BIG) for name in "ab"]
    scheduler = build()
    text = scheduler.explain_infeasible_bundle(pair, CARDS)
    assert text is not None
    assert text.startswith("the tasks of the job group never fit at the same time: next to the others there is no room")
    assert scheduler.explain_infeasible_bundle(pair, CARDS | {"n3": None}) is None
    pair[1] = ask_together("b", requirement=GpuRequirement(models=("RTX 5060",)))
    assert scheduler.explain_infeasible_bundle(pair, CARDS) is None


@pytest.mark.parametrize("resource", ["cpu_milli", "memory_mib"])
def test_together_they_leave_protected_cpu_and_memory(resource: str) -> None:
    """Next to the planned start of an earlier request there is room for one of the two, and not for both."""
    there = [node("n0", BIG, BIG, BIG, BIG, **{resource: 10_000})]
    held = hold(ask("z", time_limit_s=2 * HOUR, **{resource: 6_000}), there[0].slots[0])
    pair = [ask_together(name, time_limit_s=None, **{resource: 2_000}) for name in "bc"]
    scheduler = build_scheduler(there, held, ask("a", **{resource: 8_000}), *pair)
    assert scheduler.decide(NOW).grants == {}
    scheduler.remove("z", NOW + HOUR)
    assert scheduler.decide(NOW + HOUR).grants.keys() == {"a"}
    short = [ask_together(name, **{resource: 2_000}) for name in "bc"]
    scheduler = build_scheduler(there, held, ask("a", **{resource: 8_000}), *short)
    assert scheduler.decide(NOW).grants.keys() == {"b", "c"}


def test_together_they_leave_protected_power() -> None:
    """As CPU and memory: when the first card is released, the circuit still supplies the two of the earlier request."""
    there = on_circuit(1439, node("n0", BIG), node("n1", BIG), node("n2", SMALL), node("n3", SMALL))
    held = hold(ask("z", time_limit_s=2 * HOUR), there[0].slots[0])
    small = GpuRequirement(models=("RTX 5060",))
    pair = [ask_together(name, time_limit_s=None, requirement=small) for name in "bc"]
    scheduler = build_scheduler(there, held, ask("a", nodes=2, requirement=WANTS_BIG), *pair)
    assert scheduler.decide(NOW).grants == {}
    scheduler.remove("z", NOW + HOUR)
    assert scheduler.decide(NOW + HOUR).grants.keys() == {"a"}
