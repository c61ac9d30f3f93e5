"""What people are told: what is impossible, why they wait, when they start, and what of their own is in the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuhub.common.gpu import GpuRequirement
from gpuhub.scheduler.cycle import SchedulingCycle
from gpuhub.scheduler.explain import CONSTRAINTS_WORK, FORECAST_WORK
from gpuhub.scheduler.interface import NodeCapacity, SchedulingRequest
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
    nodes,
    slot,
)

THERE = {"n0": (BIG,), "n1": (SMALL, SMALL), "n2": (MIDDLE,)}


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (ask("a", nodes=4), "4 nodes were requested and the cluster has 3: n0, n1, n2"),
        (
            ask("a", nodes=3, exclude=frozenset({"n0"})),
            "3 nodes were requested and the cluster has 2 other than n0: n1, n2",
        ),
        (
            ask("a", requirement=GpuRequirement(models=("H200",))),
            "1 × H200 on one node was requested; none of the nodes can provide it; the cluster has: n0 with",
        ),
        (ask("a", gpus_per_node=3), "3 × any GPU on one node was requested; none of the nodes can provide it"),
        (
            ask("a", nodes=2, gpus_per_node=2),
            "2 × any GPU on each of 2 nodes was requested; 1 of the nodes can provide it",
        ),
        (ask("a", exclude=frozenset({"zz"})), "there is no node 'zz' to exclude; the cluster has: n0 with"),
        (ask("a", spread=5), "5 × any GPU on any nodes was requested; the nodes have 4 such GPUs; the cluster has"),
        (
            ask("a", spread=3, same_model=True),
            "3 × any GPU on any nodes was requested; the nodes have 2 such GPUs; the cluster has",
        ),
        (
            ask("a", nodes=2, same_model=True),
            "1 × any GPU on each of 2 nodes was requested; too few of the nodes can provide it with GPUs of one model",
        ),
        (ask("a", memory_mib=99 * 1024), "99 GiB of memory was requested; 2 of the nodes can provide it"),
        (
            ask("a", nodes=3, requirement=GpuRequirement(least_driver="600")),
            "driver 600 or newer was requested; 2 of the nodes can provide it",
        ),
    ],
)
def test_infeasible_request_is_explained_with_capacity(request_: SchedulingRequest, text: str) -> None:
    """What can never be granted is refused, whoever holds what now."""
    made = build_scheduler([NodeCapacity(name="n1", driver="570", memory_mib=64 * 1024)])
    if request_.memory_mib:
        request_ = ask("a", nodes=3, memory_mib=request_.memory_mib)
    assert (made.explain_infeasible(request_, THERE) or "").startswith(text)


def test_feasible_or_unknown_requests_are_not_refused() -> None:
    """Elastic requests by their least, and nodes not read yet by what they may have."""
    made = build_scheduler([])
    assert made.explain_infeasible(SchedulingRequest(id="a", owner="a", nodes=9, least_nodes=3), THERE) is None
    wants = ask("a", requirement=GpuRequirement(models=("H200",)))
    assert made.explain_infeasible(wants, {"n0": (BIG,), "n1": None}) is None
    assert made.explain_infeasible(wants, {"n0": (BIG,), "n1": ()}) is not None
    assert made.explain_infeasible(ask("a", nodes=2, same_model=True), {"n0": (BIG,), "n1": None, "n2": None}) is None


def test_pending_reason_has_position_holder_and_expected_start() -> None:
    """Who waits learns the place in line, who holds it, and when it will be free, in turn."""
    there = nodes([BIG], [SMALL])
    held = [
        hold(ask("x", time_limit_s=3 * HOUR), slot(there, "n0-0")),
        hold(ask("y", time_limit_s=2 * HOUR), slot(there, "n1-0")),
    ]
    made = build_scheduler(there, *held, ask("a", time_limit_s=HOUR), ask("b"), ask("c", requirement=WANTS_BIG))
    made.decide(NOW)
    whys = [made.explain_pending(name, NOW) for name in "abc"]
    assert [why.position for why in whys] == [1, 2, 3]
    assert [why.expected_start for why in whys] == [NOW + HOUR, NOW + 2 * HOUR, None]
    assert whys[0].text == "1 × any GPU on one node: held by x, y"
    with pytest.raises(KeyError):
        made.explain_pending("x", NOW)
    assert list(made.find_constraints("x", NOW)) == []


def test_each_constraint_has_the_start_without_it() -> None:
    """Each demand is left out in turn, and the start without it is told."""
    there = nodes([BIG], [SMALL], [SMALL])
    running = hold(ask("x", time_limit_s=3 * HOUR), slot(there, "n0-0"))
    asked = ask("a", nodes=2, requirement=GpuRequirement(least_memory_mib=30 * 1024), time_limit_s=9 * HOUR)
    made = build_scheduler(there, running, asked)
    found = {each.requirement: each.would_start_at for each in made.find_constraints("a", NOW)}
    assert found == {"at least 30 GiB": NOW, "2 nodes": NOW + 2 * HOUR, "time limit of 9 h": None}


def test_constraints_end_when_the_request_changes() -> None:
    """Between two constraints others may be served; what follows would be about a request that is no more."""
    there = nodes([SMALL], [SMALL])
    asked = ask("a", nodes=2, requirement=GpuRequirement(least_memory_mib=30 * 1024), time_limit_s=9 * HOUR)
    made = build_scheduler(there, asked)
    constraints = made.find_constraints("a", NOW)
    assert next(constraints).requirement == "at least 30 GiB"
    made.put_request(replace(asked, nodes=1))
    assert list(constraints) == []
    constraints = made.find_constraints("a", NOW)
    next(constraints)
    made.remove("a", NOW)
    assert list(constraints) == []


def test_the_work_of_an_explanation_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests come first, a forecast looks at so much; where that is too little, no start is told."""
    worked: list[int] = []
    run_to = SchedulingCycle.run_to

    def count(cycle: SchedulingCycle, request_id: str, max_work: int) -> None:
        run_to(cycle, request_id, max_work)
        worked.append(cycle.work)

    monkeypatch.setattr(SchedulingCycle, "run_to", count)
    requirement = GpuRequirement(models=("RTX 5090",), least_memory_mib=1024, least_capability=(8, 0))
    demands: dict[str, Any] = {"requirement": requirement, "exclusive": True, "cpu_milli": 1, "memory_mib": 1}
    queue = [
        replace(ask(f"r{number}", time_limit_s=2 * HOUR + number % 16, **demands), seq=number, created_at=NOW + number)
        for number in range(1000)
    ]
    made = build_scheduler(nodes([BIG], [BIG], [BIG]), *queue)
    made.decide(NOW + 1000)
    order = made.order_requests(NOW + 1000)
    assert made.explain_pending(order[50], NOW + 1000).expected_start is not None
    assert made.explain_pending(order[-1], NOW + 1000).expected_start is None
    # One more step may be taken, of three nodes' worth for each protected request.
    assert max(worked) <= FORECAST_WORK + 2 * 1000
    worked.clear()
    assert {each.would_start_at for each in made.find_constraints(order[-1], NOW + 1000)} == {None}
    assert sum(worked) <= CONSTRAINTS_WORK + 2 * 1000 * len(worked)
    assert worked


def test_long_lists_of_owners_are_truncated() -> None:
    """A line stays a line."""
    there = nodes([SMALL] * 8)
    held = [hold(ask(f"x{number}"), slot(there, f"n0-{number}")) for number in range(8)]
    text = build_scheduler(there, *held, ask("a")).explain_pending("a", NOW).text
    assert text == "1 × any GPU on one node: held by x0, x1, x2, x3 and 4 others"
