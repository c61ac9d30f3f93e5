"""Small snapshots for tests of the scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpuhub.common.gpu import GpuRequirement, GpuSpec
from gpuhub.scheduler.interface import (
    Allocation,
    CircuitBudget,
    GpuSlot,
    NodeAllocation,
    NodeCapacity,
    SchedulerSnapshot,
    SchedulingDecision,
    SchedulingParameters,
    SchedulingRequest,
)
from gpuhub.scheduler.scheduler import BuiltinScheduler

BIG, MIDDLE, SMALL = (
    GpuSpec(model="RTX 5090", memory_mib=32607, capability=(12, 0)),
    GpuSpec(model="RTX 5070", memory_mib=12227, capability=(12, 0)),
    GpuSpec(model="RTX 5060", memory_mib=8151, capability=(8, 9)),
)
WANTS_BIG = GpuRequirement(models=("RTX 5090",))
#: The cards' power limits.
WATTS = {BIG: 575, MIDDLE: 250, SMALL: 145}
#: The time at which tests begin, seconds.
NOW = 1_000_000.0
HOUR = 3600.0


def node(name: str, *cards: GpuSpec, **parts: Any) -> NodeCapacity:
    """Return a node with GPUs `name-0`, `name-1`, …"""
    slots = tuple(GpuSlot(uuid=f"{name}-{i}", node=name, index=i, card=card) for i, card in enumerate(cards))
    return NodeCapacity(name=name, slots=slots, **parts)


def nodes(*cards: list[GpuSpec]) -> list[NodeCapacity]:
    """Return nodes: `nodes([BIG], [SMALL, SMALL])` has n0 with n0-0, and n1 with n1-0 and n1-1."""
    return [node(f"n{number}", *of_node) for number, of_node in enumerate(cards)]


def on_circuit(gpu_watts: int, *nodes: NodeCapacity, name: str = "left") -> list[NodeCapacity]:
    """Return the nodes, on one circuit that leaves this much to their GPUs."""
    circuit = CircuitBudget(name=name, gpu_watts=gpu_watts)
    return [
        replace(
            supply,
            circuit=circuit,
            slots=tuple(replace(each, watts=WATTS.get(each.card, 300)) for each in supply.slots),
        )
        for supply in nodes
    ]


def ask(name: str, **parts: Any) -> SchedulingRequest:
    """Return a request of an owner of the same name, made in alphabetical order by default."""
    fields = {"id": name, "owner": name, "created_at": NOW - 1000 + ord(name[0])}
    if "nodes" in parts:
        fields["least_nodes"] = parts["nodes"]
    return SchedulingRequest(**{**fields, **parts})


def hold(request: SchedulingRequest, *slots: GpuSlot, on: tuple[str, ...] = (), **parts: Any) -> Allocation:
    """Return an allocation of these GPUs, or of nodes without GPUs."""
    names = dict.fromkeys([*(slot.node for slot in slots), *on])
    shares = tuple(
        NodeAllocation(node=name, slots=tuple(slot for slot in slots if slot.node == name)) for name in names
    )
    ends_at = None if request.time_limit_s is None else NOW - HOUR + request.time_limit_s
    return Allocation(
        **{"request": request, "node_allocations": shares, "granted_at": NOW - HOUR, "ends_at": ends_at, **parts}
    )


def build_scheduler(
    capacities: list[NodeCapacity],
    *entries: SchedulingRequest | Allocation,
    rules: SchedulingParameters | None = None,
    **parts: Any,
) -> BuiltinScheduler:
    """Return a scheduler with these nodes, requests and allocations."""
    scheduler = BuiltinScheduler(rules or SchedulingParameters())
    scheduler.rebuild(
        SchedulerSnapshot(
            nodes=capacities,
            requests=[each for each in entries if isinstance(each, SchedulingRequest)],
            allocations=[each for each in entries if isinstance(each, Allocation)],
            **parts,
        )
    )
    return scheduler


def granted_gpus(decision: SchedulingDecision, name: str) -> list[str]:
    """Return the GPUs that a request was granted."""
    return [slot.uuid for share in decision.grants[name].node_allocations for slot in share.slots]


def slot(capacities: list[NodeCapacity], uuid: str) -> GpuSlot:
    """Return a GPU by name."""
    return next(each for supply in capacities for each in supply.slots if each.uuid == uuid)


def with_unavailable_gpu(supply: NodeCapacity, uuid: str, trouble: str) -> NodeCapacity:
    """Return the node with one GPU unavailable."""
    slots = tuple(
        replace(s, available=False, unavailable_reason=trouble) if s.uuid == uuid else s for s in supply.slots
    )
    return replace(supply, slots=slots)
