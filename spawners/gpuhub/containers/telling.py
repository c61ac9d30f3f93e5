"""Sentences about leases, GPUs and nodes for a person who waits: pure."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from gpuhub.broker.schemas import (
    ClusterView,
    Gpu,
    GpuState,
    GpuView,
    KindView,
    Lease,
    NodeState,
    NodeView,
    PartitionView,
)
from gpuhub.gpus import Card, parse_capability
from gpuhub.quantities import format_span
from gpuhub.settings import Profile, gpu_requirement


def describe_waiting(lease: Lease | None) -> tuple[str, str]:
    """The text for a waiting lease, and HTML for a button that leaves the queue; None: the broker is silent."""
    if lease is None:
        return "The queue does not answer at present; your place in it is kept.", ""
    place = f": position {lease.position}" if lease.position else ""
    if lease.slurm_job is not None:
        place = f"{place or ':'} in Slurm's queue, as its job {lease.slurm_job}"
    parts = [f"Waiting for a GPU{place}."]
    if lease.waiting_for:
        text = lease.waiting_for if lease.slurm_job is None else capitalise(lease.waiting_for)
        parts.append(text if text.endswith(".") else f"{text}.")
    if lease.expected_start is not None:
        parts.append(f"Expected at about {describe_time(lease.expected_start)}.")
    button = (
        ' <button type="button" class="btn btn-sm btn-outline-secondary gpuhub-leave" '
        f'data-lease="{html.escape(lease.id)}">Leave the queue</button>'
    )
    return " ".join(parts), button


def capitalise(text: str) -> str:
    """A sentence as it begins."""
    return text[:1].upper() + text[1:]


def describe_placing(lease: Lease) -> str:
    """Such as `Placed on rig1: RTX 5090`, with what the broker has to say about it."""
    text = f"Placed on {lease.nodes[0]}: {describe_gpus(lease.gpus)}"
    return f"{text} ({lease.note})" if lease.note else text


def describe_gpus(gpus: Sequence[Gpu]) -> str:
    """Such as `2 × RTX 5090`, `1/4 of RTX 5090 (8 GiB cap: a promise, not a wall)`, or `no GPU`."""
    counted = Counter(_describe_gpu(gpu) for gpu in gpus)
    parts = [model if count == 1 else f"{count} × {model}" for model, count in counted.items()]
    return ", ".join(parts) or "no GPU"


def _describe_gpu(gpu: Gpu) -> str:
    if gpu.share == 1:
        return gpu.model
    return f"1/{gpu.share} of {gpu.model} ({describe_cap(gpu.memory_mib // gpu.share)})"


def describe_cap(cap_mib: int) -> str:
    """What the memory cap of a part of a GPU is worth, plainly."""
    return f"{describe_gib(cap_mib)} GiB cap: a promise, not a wall"


def describe_gib(mib: int) -> str:
    """MiB as people read GiB: `31.8`, `8`, `141`."""
    gib = mib / 1024
    return f"{gib:.0f}" if gib >= 100 else f"{gib:.3g}"


def describe_outside(gpu: GpuView) -> str:
    """Such as `in use outside gpuhub: pid 4242, 5.1 GiB`."""
    if not gpu.outside:
        return gpu.message or "in use outside gpuhub"
    parts = [
        f"pid {one.pid}" if one.memory_mib is None else f"pid {one.pid}, {one.memory_mib / 1024:.1f} GiB"
        for one in gpu.outside
    ]
    return f"in use outside gpuhub: {'; '.join(parts)}"


def describe_partition(partition: PartitionView) -> str:
    """A partition's limits in words, such as `up to 8 h, 1 h unless said; 2 nodes at most`."""
    longest, usual, most = partition.longest_s, partition.usual_s, partition.most_nodes
    times = ["no time limit" if longest is None else f"up to {format_span(longest)}"]
    if usual is not None and usual != longest:
        times.append(f"{format_span(usual)} unless said")
    parts = [", ".join(times)]
    if most is not None:
        parts.append(f"{most} node{'s' if most > 1 else ''} at most")
    if not partition.is_up:
        parts.append("down: nothing starts there at present")
    return "; ".join(parts)


def describe_kinds(kinds: Sequence[KindView]) -> str:
    """Such as `1 of 2 RTX 5090 · 0 of 1 RTX 5070`."""
    return " · ".join(f"{kind.free:,} of {kind.total:,} {kind.model}" for kind in kinds) or "no GPU"


def count_kinds(gpus: Iterable[GpuView]) -> tuple[KindView, ...]:
    """How many there are of each model, and how many of them are free; in alphabetical order."""
    there: Counter[str] = Counter()
    free: Counter[str] = Counter()
    for gpu in gpus:
        there[gpu.model] += 1
        free[gpu.model] += gpu.state is GpuState.FREE
    return tuple(KindView(model=model, free=free[model], total=count) for model, count in sorted(there.items()))


def describe_node(node: NodeView) -> str:
    """Such as `driver 570.86.15 · switch s1 · 2 leases`."""
    known = (("driver", node.driver), ("switch", node.switch), ("rack", node.rack))
    parts = [f"{what} {value}" for what, value in known if value is not None]
    if node.leases:
        parts.append(f"{node.leases} lease{'s' if node.leases > 1 else ''}")
    return " · ".join(parts)


def describe_time(when: datetime) -> str:
    """Hours and minutes here, with the day where it is another one than today."""
    local = when.astimezone()
    is_today = local.date() == datetime.now(local.tzinfo).date()
    return local.strftime("%H:%M") if is_today else f"{local.day} {local.strftime('%b %H:%M')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """A cluster in a few numbers."""

    nodes: int
    #: Nodes that take no work at present.
    away: int
    gpus: int
    free: int
    held: int
    #: Neither free nor held: of no use to anybody at present.
    lost: int
    waiting: int
    #: With Slurm: by model.
    kinds: Sequence[KindView] = ()


def count_totals(view: ClusterView | None) -> Totals | None:
    """The sums of a view; None while the broker is silent."""
    if view is None:
        return None
    states = Counter(
        # By a job beside gpuhub's it is held as well.
        GpuState.HELD if is_held_beside(gpu) else gpu.state
        for node in view.nodes
        for gpu in node.gpus
    )
    free, held = states[GpuState.FREE], states[GpuState.HELD]
    return Totals(
        nodes=len(view.nodes),
        away=sum(node.state is not NodeState.UP for node in view.nodes),
        gpus=states.total(),
        free=free,
        held=held,
        lost=states.total() - free - held,
        waiting=view.waiting,
        kinds=count_kinds(gpu for node in view.nodes for gpu in node.gpus) if view.engine == "slurm" else (),
    )


def is_held_beside(gpu: GpuView) -> bool:
    """A Slurm job that is not gpuhub's has it."""
    return gpu.state is GpuState.OUTSIDE and gpu.holder is not None and gpu.holder.is_outside


def card_of(gpu: GpuView) -> Card:
    """A GPU of a view as far as placement cares."""
    return Card(
        model=gpu.model,
        memory_mib=gpu.memory_mib,
        capability=None if gpu.capability is None else parse_capability(gpu.capability),
        is_mig=gpu.is_mig,
    )


def eligible_nodes(view: ClusterView, profile: Profile) -> list[str]:
    """The nodes that answer and could ever serve the profile: where its image has to be."""
    requirement = gpu_requirement(profile)
    return [
        node.name
        for node in view.nodes
        if node.state is NodeState.UP
        and requirement.accepts_driver(node.driver)
        and sum(requirement.accepts(card_of(gpu)) for gpu in node.gpus) >= profile.gpu_count
    ]
