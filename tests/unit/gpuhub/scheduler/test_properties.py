"""What holds for every cluster, queue and course of events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuhub.common.gpu import GpuRequirement
from gpuhub.scheduler.demand import NodeDemand
from gpuhub.scheduler.interface import (
    Allocation,
    CircuitBudget,
    Grant,
    NodeCapacity,
    Quota,
    QuotaLimits,
    Reservation,
    SchedulerSnapshot,
    SchedulingDecision,
    SchedulingParameters,
    SchedulingRequest,
    UsageRecord,
)
from gpuhub.scheduler.placement import FreeCapacity, PlacementChoice
from gpuhub.scheduler.scheduler import BuiltinScheduler
from tests.support.scheduler_snapshots import BIG, HOUR, MIDDLE, NOW, SMALL, WANTS_BIG, node

REQUIREMENTS = [
    GpuRequirement(),
    WANTS_BIG,
    GpuRequirement(least_memory_mib=12 * 1024),
    GpuRequirement(models=("RTX 5070", "RTX 5060")),
    GpuRequirement(least_driver="570"),
]


class FirstFit:
    """A policy that knows no workload, so that engines of different age answer alike."""

    def choose(self, state: FreeCapacity, demand: NodeDemand) -> PlacementChoice | None:
        """The first cards that will do; the fullest node."""
        cards = demand.cards
        open_ = [
            at
            for at, free in enumerate(state.free)
            if free >= demand.milli and (cards is None or state.cards[at] in cards)
        ]
        dear = [cards.index(state.cards[at]) if cards else state.cards[at].memory_mib for at in open_]
        chosen = [at for _, at in sorted(zip(dear, open_, strict=True))][: demand.gpus]
        rank = (float(sum(state.cards[at].memory_mib for at in chosen)), float(sum(state.free)))
        return PlacementChoice(rank=rank, gpus=tuple(sorted(chosen))) if len(chosen) == demand.gpus else None


def new_scheduler(parameters: SchedulingParameters) -> BuiltinScheduler:
    return BuiltinScheduler(parameters, lambda workload, supply: FirstFit())


#: Power limits of the cards, watts.
WATTS = {BIG: 575, MIDDLE: 250, SMALL: 145}


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeCapacity]:
    made = []
    circuits = {
        name: CircuitBudget(name=name, gpu_watts=draw(st.sampled_from([200, 600, 900, 1300]))) for name in ("c0", "c1")
    }
    enforced = draw(st.sampled_from([{}, circuits]))
    for number in range(draw(st.integers(1, 4))):
        cards = draw(st.lists(st.sampled_from([BIG, MIDDLE, SMALL]), max_size=3))
        supply = node(
            f"n{number}",
            *cards,
            takes_work=draw(st.integers(0, 7)) > 0,
            driver=draw(st.sampled_from([None, "550.1", "575.2"])),
            switch=draw(st.sampled_from([None, "s0", "s1"])),
            cpu_milli=draw(st.sampled_from([None, 4000])),
            cpu_per_gpu=4000 // max(1, len(cards)),
            cpu_without_gpu=1000,
            groups=draw(st.sampled_from([frozenset(), frozenset(), frozenset({"g"}), frozenset({"g", "h"})])),
        )
        broken = draw(st.sets(st.sampled_from(supply.slots))) if supply.slots and not draw(st.integers(0, 3)) else set()
        parent = draw(st.sampled_from([None, None, f"g{number}"]))
        slots = tuple(
            replace(each, available=each not in broken, watts=300 if parent else WATTS[each.card], parent=parent)
            for each in supply.slots
        )
        circuit = enforced.get(draw(st.sampled_from(["c0", "c0", "c1", ""])))
        made.append(replace(supply, slots=slots, circuit=circuit))
    return made


@st.composite
def requests(draw: st.DrawFn, name: str, *, limited: bool = False, bundled: bool = False) -> SchedulingRequest:
    shape: dict[str, Any] = draw(
        st.sampled_from(
            [
                {},
                {"gpus_per_node": 2},
                {"nodes": 2, "least_nodes": 2},
                {"nodes": 3, "least_nodes": 1},
                {"spread": 3},
                {"share": 2},
                {"share": 3},
                {"gpus_per_node": 0},
                {"nodes": 2, "least_nodes": 2, "same_model": True},
                {"exclusive": True},
                {"exclude": frozenset({"n0"})},
                {"scavenge": True},
            ]
        )
    )
    limits = [HOUR, 2 * HOUR, 5 * HOUR] + ([] if limited else [None])
    owner = draw(st.sampled_from("xyz"))
    return SchedulingRequest(
        **shape,
        id=name,
        owner=owner,
        groups=frozenset({"g"}) if owner == "x" else frozenset(),
        created_at=NOW - 1000 * draw(st.integers(0, 60)),
        seq=int(name[1:]),
        requirement=draw(st.sampled_from(REQUIREMENTS)),
        batch=draw(st.booleans()),
        priority=draw(st.integers(-1, 1)),
        time_limit_s=draw(st.sampled_from(limits)),
        cpu_milli=draw(st.sampled_from([0, 0, 1000, 3000])),
        cpu_by_gpu=draw(st.booleans()),
        bundle=f"{owner}-bundle" if bundled and draw(st.booleans()) else None,
    )


@st.composite
def parameters(draw: st.DrawFn) -> SchedulingParameters:
    return SchedulingParameters(
        protected=draw(st.sampled_from([1, 4])),
        backfill=draw(st.integers(0, 3)) > 0,
        preemption=draw(st.booleans()),
        half_life_s=24 * HOUR,
    )


@st.composite
def quotas(draw: st.DrawFn) -> dict[str, Quota]:
    found = {}
    for owner in draw(st.sets(st.sampled_from("xyz"))):
        each = QuotaLimits(
            max_gpus=draw(st.sampled_from([None, 1, 3])),
            gpu_hours_per_week=draw(st.sampled_from([None, None, 4.0])),
        )
        together = {"g": QuotaLimits(max_gpus=2)} if owner == "x" and draw(st.booleans()) else {}
        found[owner] = Quota(per_user=each, per_group=together, weight=draw(st.sampled_from([1.0, 2.0])))
    return found


@st.composite
def reservations(draw: st.DrawFn, there: list[NodeCapacity]) -> tuple[Reservation, ...]:
    uuids = [slot.uuid for supply in there for slot in supply.slots]
    if not uuids or draw(st.integers(0, 2)):
        return ()
    begins = NOW + draw(st.sampled_from([-HOUR, 0.0, 1.5 * HOUR]))
    return (
        Reservation(
            id="v",
            name="course",
            uuids=frozenset(draw(st.sets(st.sampled_from(uuids), min_size=1))),
            users=frozenset(draw(st.sampled_from(["x", "y"]))),
            groups=frozenset(),
            starts_at=begins,
            ends_at=begins + 4 * HOUR,
        ),
    )


@dataclass
class SimulatedBroker:
    """A broker as the scheduler sees it: it stores changes, reports them and carries out decisions."""

    scheduler: BuiltinScheduler
    parameters: SchedulingParameters
    nodes: dict[str, NodeCapacity]
    quotas: dict[str, Quota] = field(default_factory=dict)
    reservations: tuple[Reservation, ...] = ()
    requests: dict[str, SchedulingRequest] = field(default_factory=dict)
    allocations: dict[str, Allocation] = field(default_factory=dict)
    usage_records: list[UsageRecord] = field(default_factory=list)
    now: float = NOW

    def take_snapshot(self) -> SchedulerSnapshot:
        return SchedulerSnapshot(
            nodes=list(self.nodes.values()),
            requests=list(self.requests.values()),
            allocations=list(self.allocations.values()),
            reservations=self.reservations,
            usage_records=self.usage_records,
            quotas=self.quotas,
        )

    def build_fresh_scheduler(self) -> BuiltinScheduler:
        made = new_scheduler(self.parameters)
        made.rebuild(self.take_snapshot())
        return made

    def add_request(self, request: SchedulingRequest) -> None:
        self.requests[request.id] = request
        self.scheduler.put_request(request)

    def end_request(self, name: str) -> None:
        self.requests.pop(name, None)
        allocation = self.allocations.pop(name, None)
        for share in allocation.node_allocations if allocation and not allocation.is_quarantined else ():
            for slot in share.slots:
                request = allocation.request
                self.usage_records.append(
                    UsageRecord(
                        owner=request.owner,
                        groups=request.groups,
                        card=slot.card,
                        share=request.share,
                        started_at=allocation.granted_at,
                        ended_at=self.now,
                    )
                )
        self.scheduler.remove(name, self.now)

    def set_allocation(self, allocation: Allocation) -> None:
        self.allocations[allocation.request.id] = allocation
        self.scheduler.put_allocation(allocation)

    def decide(self) -> SchedulingDecision:
        decision = self.scheduler.decide(self.now)
        for name, grant in decision.grants.items():
            self.grant(self.requests.pop(name), grant)
        for preemption in decision.preemptions:
            allocation = self.allocations[preemption.allocation_id]
            if preemption.is_whole:
                self.set_allocation(replace(allocation, is_ending=True))
            else:
                self.set_allocation(replace(allocation, shrinking=allocation.shrinking | preemption.nodes))
        return decision

    def grant(self, request: SchedulingRequest, grant: Grant) -> None:
        ends_at = None if request.time_limit_s is None else self.now + request.time_limit_s
        self.set_allocation(
            Allocation(request=request, node_allocations=grant.node_allocations, granted_at=self.now, ends_at=ends_at)
        )

    def complete_release(self, name: str) -> None:
        """Free the nodes that an allocation was asked to release."""
        allocation = self.allocations[name]
        if allocation.is_ending:
            self.end_request(name)
        elif allocation.shrinking:
            kept = tuple(share for share in allocation.node_allocations if share.node not in allocation.shrinking)
            self.set_allocation(replace(allocation, node_allocations=kept, shrinking=frozenset()))

    def check_decision(self, decision: SchedulingDecision) -> None:
        """No GPU twice, bundles as a whole, and everything that the granted ones asked for."""
        for name, grant in decision.grants.items():
            request = self.allocations[name].request
            check_grant(self, request, grant)
            assert request.bundle is None or request.bundle not in {other.bundle for other in self.requests.values()}
        self.check_circuits()
        for supply in self.nodes.values():
            for slot in supply.slots:
                shares = [
                    allocation.request.share
                    for allocation in self.allocations.values()
                    for share in allocation.node_allocations
                    if slot in share.slots
                ]
                assert len(set(shares)) <= 1
                assert len(shares) <= (shares[0] if shares else 0)
            here = [
                h for h in self.allocations.values() if any(share.node == supply.name for share in h.node_allocations)
            ]
            assert not any(h.request.exclusive for h in here) or len(here) == 1
            if supply.cpu_milli is not None:
                sizes = [
                    h.request.cpu_milli if share.cpu_milli is None else share.cpu_milli
                    for h in here
                    for share in h.node_allocations
                    if share.node == supply.name
                ]
                assert sum(sizes) <= supply.cpu_milli
                assert all(
                    size >= h.request.cpu_milli and (h.request.cpu_by_gpu or size == h.request.cpu_milli)
                    for h, size in zip(here, sizes, strict=True)
                )

    def check_circuits(self) -> None:
        """Count the power of each GPU once that an allocation has, and compare it with what the scheduler reports."""
        used = {
            each.whole_uuid for h in self.allocations.values() for share in h.node_allocations for each in share.slots
        }
        taken: Counter[str] = Counter()
        budgets = {}
        for supply in self.nodes.values():
            if supply.circuit is not None:
                watts = {each.whole_uuid: each.watts or 0 for each in supply.slots if each.whole_uuid in used}
                taken[supply.circuit.name] += sum(watts.values())
                budgets[supply.circuit.name] = supply.circuit.gpu_watts
        reported = self.scheduler.report_circuits()
        assert {name: (usage.taken_watts, usage.gpu_watts) for name, usage in reported.items()} == {
            name: (taken[name], budget) for name, budget in budgets.items()
        }
        assert all(taken[name] <= budget for name, budget in budgets.items())


def check_grant(broker: SimulatedBroker, request: SchedulingRequest, grant: Grant) -> None:
    """What a grant promises to the one who asked."""
    slots = [slot for share in grant.node_allocations for slot in share.slots]
    assert len({share.node for share in grant.node_allocations}) == len(grant.node_allocations)
    if request.spread is not None:
        assert len(slots) == request.spread
    else:
        assert request.least_nodes <= len(grant.node_allocations) <= request.nodes
        assert all(len(share.slots) == request.gpus_per_node for share in grant.node_allocations)
    for share in grant.node_allocations:
        supply = broker.nodes[share.node]
        assert supply.takes_work
        assert share.node not in request.exclude
        assert supply.admits(request.groups)
        assert request.requirement.accepts_driver(supply.driver)
        assert all(slot in supply.slots and slot.available for slot in share.slots)
    assert all(request.requirement.accepts(slot.card) for slot in slots)
    assert not request.same_model or len({slot.card.model for slot in slots}) == 1
    for each in broker.reservations:
        if not each.admits(request.owner, request.groups) and each.ends_at > broker.now:
            limit = request.time_limit_s
            is_before = limit is not None and broker.now + limit <= each.starts_at
            assert is_before or not each.uuids & {slot.uuid for slot in slots}
    check_limits(broker, request, slots)


def check_limits(broker: SimulatedBroker, request: SchedulingRequest, slots: list[Any]) -> None:
    if not slots:
        return
    quota = broker.quotas.get(request.owner, Quota())
    held: Counter[str] = Counter()
    for allocation in broker.allocations.values():
        if not allocation.is_quarantined:
            count = sum(len(share.slots) for share in allocation.node_allocations)
            held[allocation.request.owner] += count
            held.update(dict.fromkeys(allocation.request.groups, count))
    assert quota.per_user.max_gpus is None or held[request.owner] <= quota.per_user.max_gpus
    for group, limits in quota.per_group.items():
        assert limits.max_gpus is None or held[group] <= limits.max_gpus


@st.composite
def brokers(draw: st.DrawFn, *, limited: bool = False, plain: bool = False, bundled: bool = False) -> SimulatedBroker:
    """A broker with a cluster; `plain` without limits and reservations."""
    there = draw(clusters())
    chosen = draw(parameters())
    broker = SimulatedBroker(
        scheduler=new_scheduler(chosen),
        parameters=chosen,
        nodes={supply.name: supply for supply in there},
        quotas={} if plain else draw(quotas()),
        reservations=() if plain else draw(reservations(there)),
    )
    broker.scheduler.rebuild(broker.take_snapshot())
    for number in range(draw(st.integers(1, 8))):
        broker.add_request(draw(requests(f"r{number}", limited=limited, bundled=bundled)))
    return broker


def step(broker: SimulatedBroker, data: st.DataObject, number: int) -> None:
    """Something happens."""
    what = data.draw(st.sampled_from(["ask", "end", "wait", "node", "quarantine", "release", "quota"]))
    if what == "ask":
        broker.add_request(data.draw(requests(f"r{number}", bundled=True)))
    elif what == "end" and broker.allocations:
        broker.end_request(data.draw(st.sampled_from(sorted(broker.allocations))))
    elif what == "wait":
        broker.now += data.draw(st.sampled_from([60.0, HOUR, 30 * HOUR]))
    elif what == "node":
        supply = data.draw(st.sampled_from(list(broker.nodes.values())))
        broker.nodes[supply.name] = replace(supply, takes_work=not supply.takes_work)
        broker.scheduler.put_node(broker.nodes[supply.name])
    elif what == "quarantine" and broker.allocations:
        name = data.draw(st.sampled_from(sorted(broker.allocations)))
        broker.set_allocation(replace(broker.allocations[name], is_quarantined=True))
    elif what == "release" and broker.allocations:
        broker.complete_release(data.draw(st.sampled_from(sorted(broker.allocations))))
    elif what == "quota":
        broker.quotas["y"] = Quota(per_user=QuotaLimits(max_gpus=data.draw(st.integers(0, 3))))
        broker.scheduler.put_quota("y", broker.quotas["y"])


@settings(max_examples=150, deadline=None)
@given(brokers(bundled=True), st.data())
def test_updated_scheduler_equals_a_rebuilt_one(broker: SimulatedBroker, data: st.DataObject) -> None:
    """After any course of events it decides, orders and explains the same; what it decides is right."""
    for number in range(20, 20 + data.draw(st.integers(1, 8))):
        step(broker, data, number)
        anew = broker.build_fresh_scheduler()
        assert broker.scheduler.order_requests(broker.now) == anew.order_requests(broker.now)
        for name in broker.requests:
            assert broker.scheduler.explain_pending(name, broker.now) == anew.explain_pending(name, broker.now)
        expected = anew.decide(broker.now)
        decision = broker.decide()
        assert decision == expected
        broker.check_decision(decision)
        again = broker.scheduler.decide(broker.now)
        assert (again.grants, again.preemptions) == ({}, ())


@settings(max_examples=60, deadline=None)
@given(brokers(bundled=True), st.data())
def test_explanations_and_trials_do_not_change_state(broker: SimulatedBroker, data: st.DataObject) -> None:
    """Explanations in full and trial requests leave the scheduler as it was, and a trial says what comes true."""
    trial = data.draw(requests("t99"))
    expected = broker.build_fresh_scheduler().decide(broker.now)
    for name in broker.requests:
        broker.scheduler.explain_pending(name, broker.now)
        list(broker.scheduler.find_constraints(name, broker.now))
    starts = broker.scheduler.can_start_now(trial, broker.now)
    assert broker.decide() == expected
    other = broker.build_fresh_scheduler()
    assert other.can_start_now(trial, broker.now) == (
        other.put_request(trial) or trial.id in other.decide(broker.now).grants
    )
    assert isinstance(starts, bool)


@settings(max_examples=100, deadline=None)
@given(brokers(plain=True))
def test_no_request_that_fits_stays_pending(broker: SimulatedBroker) -> None:
    """Who waits would not even be served alone, or only with what is kept for the protected before."""
    broker.decide()
    for request in list(broker.requests.values()):
        alone = replace(broker.take_snapshot(), requests=[request])
        made = new_scheduler(replace(broker.parameters, preemption=False))
        made.rebuild(alone)
        if request.id in made.decide(broker.now).grants:
            text = broker.scheduler.explain_pending(request.id, broker.now).text
            assert "requested earlier by others" in text or request.size == 0 or request.cpu_milli
            assert any(
                broker.scheduler.order_requests(broker.now).index(other)
                < broker.scheduler.order_requests(broker.now).index(request.id)
                for other in broker.requests
            )


@settings(max_examples=150, deadline=None)
@given(brokers(limited=True, plain=True), st.data())
def test_backfill_never_delays_the_first_request(broker: SimulatedBroker, data: st.DataObject) -> None:
    """With true time limits, the first in line starts by the moment it was told, however many pass it."""
    broker.scheduler = new_scheduler(replace(broker.parameters, backfill=True, fair_share_s=0.0, preemption=False))
    broker.scheduler.rebuild(broker.take_snapshot())
    broker.decide()
    order = broker.scheduler.order_requests(broker.now)
    told = {name: broker.scheduler.explain_pending(name, broker.now).expected_start for name in order}
    first = next((name for name in order if told[name] is not None), None)
    if first is None or first != order[0]:
        return
    priority = broker.requests[first].priority
    for number in range(30, 30 + data.draw(st.integers(2, 9))):
        late = data.draw(requests(f"r{number}", limited=True))
        broker.add_request(replace(late, created_at=NOW + number, priority=priority, batch=True))
    while first in broker.requests:
        broker.decide()
        if first not in broker.requests:
            break
        ends = sorted((allocation.ends_at or 0.0, name) for name, allocation in broker.allocations.items())
        assert ends
        broker.now = max(broker.now, ends[0][0])
        assert broker.now <= (told[first] or 0.0)
        broker.end_request(ends[0][1])
        for moment, name in ends[1:]:
            if moment <= broker.now:
                broker.end_request(name)
    assert broker.now <= (told[first] or 0.0)


@settings(max_examples=40, deadline=None)
@given(brokers(plain=True), st.data())
def test_no_request_starves(broker: SimulatedBroker, data: st.DataObject) -> None:
    """Whatever comes later, every request that can be served is served within a bounded time."""
    broker.nodes = {name: replace(supply, takes_work=True) for name, supply in broker.nodes.items()}
    for supply in broker.nodes.values():
        broker.scheduler.put_node(supply)
    possible = {}
    for request in broker.requests.values():
        alone = new_scheduler(broker.parameters)
        alone.rebuild(SchedulerSnapshot(nodes=list(broker.nodes.values()), requests=[request]))
        if alone.decide(broker.now).grants:
            possible[request.id] = request
    for number in range(30, 190):
        if number < 50:
            broker.add_request(
                replace(data.draw(requests("r1", limited=True)), id=f"r{number}", seq=number, created_at=broker.now)
            )
        broker.now += 2 * HOUR
        for name, allocation in list(broker.allocations.items()):
            if broker.now >= allocation.granted_at + (allocation.request.time_limit_s or 3 * HOUR):
                broker.end_request(name)
        broker.decide()
    assert not set(possible) & set(broker.requests)
