"""In which order requests are served, what may pass whom, and what owners may have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuhub.scheduler.interface import (
    Allocation,
    NodeCapacity,
    Quota,
    QuotaLimits,
    Reservation,
    SchedulingParameters,
    SchedulingRequest,
    UsageRecord,
)
from gpuhub.scheduler.queue import compute_penalty
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
    nodes,
    slot,
)

DAY = 24 * HOUR


def build_usage(owner: str, hours: float, ended_at: float = NOW, **parts: object) -> UsageRecord:
    """GPU-time on the middle card."""
    made = {"groups": frozenset(), "card": MIDDLE, "share": 1, "started_at": ended_at - hours * HOUR}
    return UsageRecord(**{**made, **parts, "owner": owner, "ended_at": ended_at})  # type: ignore[arg-type]


def test_queue_order_follows_age_priority_and_interactivity() -> None:
    """First come, first served; a point of priority counts as ten minutes, a watched request as four hours."""
    asks = [
        ask("a", created_at=NOW, batch=True),
        ask("b", created_at=NOW - 60, batch=True),
        ask("c", created_at=NOW, batch=True, priority=1),
        ask("d", created_at=NOW + 3 * HOUR),
        ask("e", created_at=NOW, batch=True, seq=1),
    ]
    assert build_scheduler(nodes([BIG]), *asks).order_requests(NOW) == ["d", "c", "b", "a", "e"]


def test_fair_share_delays_heavy_users_by_at_most_a_day() -> None:
    """GPU-time counts half after a week, against that of all, and never for more than `fair_share_s`."""
    asks = [ask("ada", created_at=NOW - 2 * HOUR), ask("ben", created_at=NOW - HOUR)]
    used = [build_usage("ada", 20), build_usage("ben", 10)]
    made = build_scheduler(nodes([BIG]), *asks, usage_records=used)
    assert made.order_requests(NOW) == ["ben", "ada"]
    usage = made.report_usage(NOW)
    assert 0 < usage["ben"].penalty_s < usage["ada"].penalty_s < DAY
    assert made.report_usage(NOW + 7 * DAY)["ada"].decayed_gpu_hours == pytest.approx(
        usage["ada"].decayed_gpu_hours / 2
    )
    old = replace(asks[0], created_at=NOW - DAY - 2 * HOUR)
    assert build_scheduler(nodes([BIG]), old, asks[1], usage_records=[build_usage("ada", 1000)]).order_requests(
        NOW
    ) == [
        "ada",
        "ben",
    ]


@pytest.mark.parametrize("due", [0.01, 0.5, 1.0])
def test_fair_share_penalty_is_bounded_and_grows_with_usage(due: float) -> None:
    """Nothing for who used nothing, all for who used all."""
    penalties = [
        compute_penalty(used, 10.0, due, SchedulingParameters(fair_share_s=1000.0)) for used in (0.0, 1.0, 5.0, 10.0)
    ]
    assert penalties == sorted(penalties)
    assert (penalties[0], penalties[-1]) == (0.0, 1000.0)


def test_usage_includes_running_leases_shares_and_gpu_weights() -> None:
    """A half GPU counts half, a dear card more, and what runs counts as it goes."""
    there = nodes([BIG, MIDDLE])
    part = hold(ask("ada", share=2), slot(there, "n0-1"))
    whole = hold(ask("ben"), slot(there, "n0-0"))
    rules = SchedulingParameters(card_values={"RTX 5090": 4.0, "RTX 5070": 1.0})
    used = build_scheduler(there, part, whole, rules=rules).report_usage(NOW)
    assert used["ben"].decayed_gpu_hours == pytest.approx(4.0, rel=0.01)
    assert used["ada"].decayed_gpu_hours == pytest.approx(0.5, rel=0.01)
    assert (used["ada"].gpus, used["ada"].gpu_hours_week) == (1, 0.5)


def test_fair_share_weights_favour_users() -> None:
    """Of two who used as much, the one whose due is more goes first."""
    asks = [ask("ada", created_at=NOW - 60), ask("ben", created_at=NOW)]
    used = [build_usage("ada", 10), build_usage("ben", 10)]
    made = build_scheduler(nodes([BIG]), *asks, usage_records=used, quotas={"ben": Quota(weight=3.0)})
    assert made.order_requests(NOW) == ["ben", "ada"]


def test_only_short_requests_are_backfilled() -> None:
    """What the first in line counts on is free to those who end before its start."""
    there = nodes([BIG, BIG])
    running = hold(ask("x", time_limit_s=3 * HOUR), slot(there, "n0-0"))
    both = ask("a", gpus_per_node=2)
    short, long = ask("b", time_limit_s=2 * HOUR), ask("c", time_limit_s=2 * HOUR + 1)
    made = build_scheduler(there, running, both, long)
    assert made.decide(NOW).grants == {}
    assert made.explain_pending("a", NOW).expected_start == NOW + 2 * HOUR
    made.put_request(short)
    assert set(made.decide(NOW).grants) == {"b"}
    assert made.explain_pending("a", NOW).expected_start == NOW + 2 * HOUR


def test_needed_gpus_stay_reserved_when_the_start_is_unknown() -> None:
    """A holding without a time limit never lets others pass on the GPUs that the first in line counts on."""
    there = nodes([BIG, BIG], [SMALL])
    running = hold(ask("x"), slot(there, "n0-0"))
    both = ask("a", gpus_per_node=2)
    made = build_scheduler(there, running, both, ask("b", time_limit_s=60.0, requirement=WANTS_BIG), ask("c"))
    assert set(made.decide(NOW).grants) == {"c"}
    assert made.explain_pending("a", NOW).expected_start is None
    assert made.explain_pending("b", NOW).text == "1 × RTX 5090 on one node: held by x; requested earlier by others"


def test_blocked_request_reserves_all_candidates_without_backfill() -> None:
    """Behind a waiter for the large card the small one is free, behind one for any card nothing is."""
    there = nodes([BIG], [SMALL])
    running = hold(ask("x", time_limit_s=9 * HOUR), slot(there, "n0-0"))
    strict = SchedulingParameters(backfill=False)
    short = ask("b", time_limit_s=60.0)
    large = build_scheduler(there, running, ask("a", requirement=WANTS_BIG), short, rules=strict)
    assert set(large.decide(NOW).grants) == {"b"}
    gang = build_scheduler(there, running, ask("a", nodes=2), short, rules=strict)
    assert gang.decide(NOW).grants == {}


def test_first_request_of_each_pool_is_protected() -> None:
    """Many waiters for one model leave the first waiter for another model its place."""
    there = nodes([BIG], [SMALL, SMALL])
    held = [hold(ask("x"), slot(there, "n0-0")), hold(ask("y", time_limit_s=3 * HOUR), slot(there, "n1-0"))]
    large = [ask(f"a{number}", requirement=WANTS_BIG) for number in range(6)]
    small = ask("b", gpus_per_node=2, requirement=replace(WANTS_BIG, models=("RTX 5060",)))
    made = build_scheduler(there, *held, *large, small, ask("c"), rules=SchedulingParameters(protected=2))
    assert made.decide(NOW).grants == {}
    assert made.explain_pending("b", NOW).expected_start == NOW + 2 * HOUR


def test_owner_at_the_quota_waits_and_delays_no_request() -> None:
    """Who holds as many GPUs as allowed waits, is told so, and others pass; also within one decision."""
    there = nodes([BIG], [SMALL])
    quotas = {"ada": Quota(per_user=QuotaLimits(max_gpus=1))}
    asks = [ask("a", owner="ada"), ask("b", owner="ada"), ask("c", owner="ben")]
    made = build_scheduler(there, *asks, quotas=quotas)
    assert set(made.decide(NOW).grants) == {"a", "c"}
    assert made.explain_pending("b", NOW).text == "ada holds 1 of at most 1 GPUs and asks for 1 more"
    made.put_quota("ada", Quota(per_user=QuotaLimits(max_gpus=2)))
    made.remove("c", NOW)
    assert set(made.decide(NOW).grants) == {"b"}


def test_group_quota_counts_all_members() -> None:
    """What members hold counts for all of them; an elastic request takes what is left."""
    there = nodes([BIG], [SMALL], [MIDDLE])
    team = frozenset({"team"})
    quotas = dict.fromkeys(("ada", "ben"), Quota(per_group={"team": QuotaLimits(max_gpus=2)}))
    held = hold(ask("x", owner="ada", groups=team), slot(there, "n0-0"))
    elastic = SchedulingRequest(id="a", owner="ben", groups=team, nodes=3, least_nodes=1)
    made = build_scheduler(there, held, elastic, quotas=quotas)
    assert len(granted_gpus(made.decide(NOW), "a")) == 1
    made.put_request(ask("b", owner="ada", groups=team))
    assert made.explain_pending("b", NOW).text == "team holds 2 of at most 2 GPUs and ada asks for 1 more"


def test_weekly_gpu_hours_free_up_as_they_leave_the_window() -> None:
    """Who used them up waits, and the scheduler says when to look again."""
    made = build_scheduler(
        nodes([BIG]),
        ask("a", owner="ada"),
        usage_records=[build_usage("ada", 10, NOW - DAY)],
        quotas={"ada": Quota(per_user=QuotaLimits(gpu_hours_per_week=8.0))},
    )
    decision = made.decide(NOW)
    assert decision.grants == {}
    assert made.explain_pending("a", NOW).text == "ada used 10 of at most 8 GPU-hours in seven days"
    again_at = decision.decide_again_at
    assert again_at == pytest.approx(NOW + 6 * DAY - 8 * HOUR, abs=2)
    assert set(made.decide(again_at or 0.0).grants) == {"a"}


def test_reserved_gpus_are_granted_only_to_their_users() -> None:
    """Others may use them as long as they end before; within the window only the users may."""
    course = Reservation(
        id="v",
        name="course",
        uuids=frozenset({"n0-0"}),
        users=frozenset(),
        groups=frozenset({"students"}),
        starts_at=NOW + 2 * HOUR,
        ends_at=NOW + 4 * HOUR,
    )
    student = ask("s", groups=frozenset({"students"}))
    asks = [ask("a"), ask("b", time_limit_s=3 * HOUR)]
    made = build_scheduler(nodes([BIG]), *asks, reservations=[course])
    decision = made.decide(NOW)
    assert (decision.grants, decision.decide_again_at) == ({}, NOW + 2 * HOUR)
    assert (
        "reserved from 1970-01-12 15:46 UTC until 1970-01-12 17:46 UTC: course" in made.explain_pending("a", NOW).text
    )
    made.put_request(ask("c", time_limit_s=2 * HOUR))
    assert set(made.decide(NOW).grants) == {"c"}
    made.remove("c", NOW + 2 * HOUR)
    made.put_request(student)
    assert set(made.decide(NOW + 2 * HOUR).grants) == {"s"}
    made.remove("s", NOW + 4 * HOUR)
    assert set(made.decide(NOW + 4 * HOUR).grants) == {"a"}


def scavenger(name: str, there: list[NodeCapacity], uuid: str, **parts: float) -> Allocation:
    return hold(ask(name, scavenge=True), slot(there, uuid), **parts)


def test_scavenging_job_is_preempted_and_its_gpu_is_reserved() -> None:
    """As few as needed, the youngest; the request gets what is given back, and nobody else."""
    there = nodes([BIG, BIG, BIG])
    held = [scavenger(name, there, f"n0-{n}", granted_at=NOW - HOUR + n) for n, name in enumerate("xyz")]
    made = build_scheduler(there, *held, ask("a"), rules=SchedulingParameters(preemption=True))
    (taken,) = made.decide(NOW).preemptions
    assert (taken.allocation_id, taken.is_whole, taken.for_request) == ("z", True, "a")
    assert made.explain_pending("a", NOW).text.startswith(
        "1 × any GPU on one node: waits for z to release 1 × RTX 5090"
    )
    made.put_allocation(replace(held[2], is_ending=True))
    made.put_request(ask("b", scavenge=True, created_at=0.0))
    assert made.decide(NOW).preemptions == ()
    made.remove("z", NOW + 1)
    assert set(made.decide(NOW + 1).grants) == {"a"}


def test_preemption_needs_permission_and_must_help() -> None:
    """Preemption is off by default, not for scavenging requests, and not where it does not help."""
    there = nodes([BIG, BIG])
    held = scavenger("x", there, "n0-0")
    other = hold(ask("y"), slot(there, "n0-1"))
    on = SchedulingParameters(preemption=True)
    assert build_scheduler(there, held, other, ask("a")).decide(NOW).preemptions == ()
    assert build_scheduler(there, held, other, ask("a", scavenge=True), rules=on).decide(NOW).preemptions == ()
    assert build_scheduler(there, held, other, ask("a", gpus_per_node=2), rules=on).decide(NOW).preemptions == ()
    ending = replace(held, is_ending=True)
    assert build_scheduler(there, ending, other, ask("a"), rules=on).decide(NOW).preemptions == ()


def test_elastic_allocation_shrinks_to_its_minimum() -> None:
    """A node is given up where it is needed, and no more than the holding can spare."""
    there = nodes([BIG], [BIG], [BIG])
    elastic = SchedulingRequest(id="x", owner="x", nodes=3, least_nodes=2)
    held = hold(elastic, *(slot(there, f"n{number}-0") for number in range(3)))
    made = build_scheduler(there, held, ask("a"), ask("b"), rules=SchedulingParameters(preemption=True))
    (taken,) = made.decide(NOW).preemptions
    assert (taken.allocation_id, taken.is_whole, len(taken.nodes)) == ("x", False, 1)
    assert made.decide(NOW + 1).preemptions == ()
    made.put_allocation(
        replace(held, node_allocations=tuple(s for s in held.node_allocations if s.node not in taken.nodes))
    )
    assert set(made.decide(NOW + 1).grants) == {"a"}


def test_quarantined_allocation_blocks_gpus_and_is_not_charged() -> None:
    """The owner may have others, pays nothing for it, and it has no known end."""
    there = nodes([BIG])
    stuck = hold(ask("x", owner="ada", time_limit_s=HOUR), slot(there, "n0-0"), is_quarantined=True)
    made = build_scheduler(there, stuck, ask("a", owner="ada"), quotas={"ada": Quota(per_user=QuotaLimits(max_gpus=1))})
    assert made.decide(NOW).grants == {}
    assert made.explain_pending("a", NOW).expected_start is None
    assert made.report_usage(NOW)["ada"].gpus == 0
    made.record_usage(build_usage("ada", 2))
    assert made.report_usage(NOW)["ada"].gpu_hours_week == pytest.approx(2)
