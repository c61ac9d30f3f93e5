"""Texts and totals about leases, GPUs and nodes that the pages show to users."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from gpuhub.broker_api.schemas import (
    ClusterView,
    GpuModelView,
    GpuState,
    GpuView,
    LeasedGpuView,
    LeaseState,
    LeaseView,
    NodeState,
    NodeView,
    PartitionView,
    Purpose,
)
from gpuhub.broker_api.schemas.bench import NodeBenchView
from gpuhub.broker_api.schemas.cluster import count_models
from gpuhub.broker_api.schemas.limits import UserLimits
from gpuhub.common.gpu import GpuSpec, parse_capability
from gpuhub.common.node_access import describe_access
from gpuhub.common.units import format_bits, format_flops, format_span
from gpuhub.config.containers.profiles import gpu_requirement
from gpuhub.config.settings import ProfileSettings


def describe_waiting(lease: LeaseView | None) -> tuple[str, str]:
    """Return the text for a waiting lease, and the same as HTML with a button that leaves the queue.

    None stands for a broker that does not answer. In the HTML, times are for the page's script, which converts them to
    the user's time zone.
    """
    if lease is None:
        text = "The queue does not answer; your place in it is kept."
        return text, html.escape(text)
    place = f": position {lease.position}" if lease.position else ""
    if lease.slurm_job is not None:
        place = f"{place or ':'} in Slurm's queue, as job {lease.slurm_job}"
    parts = [f"Waiting for a GPU{place}."]
    if lease.waiting_for:
        text = lease.waiting_for if lease.slurm_job is None else capitalise(lease.waiting_for)
        parts.append(text if text.endswith(".") else f"{text}.")
    text = " ".join(parts)
    shown = html.escape(text)
    if lease.expected_start is not None:
        clock = describe_time(lease.expected_start)
        text += f" Expected at about {clock}."
        shown += f' Expected at about <time datetime="{lease.expected_start.isoformat()}">{clock}</time>.'
    button = (
        ' <button type="button" class="btn btn-sm btn-outline-secondary gpuhub-leave" '
        f'data-lease="{html.escape(lease.id)}">Leave the queue</button>'
    )
    return text, shown + button


def describe_user_limits(limits: UserLimits) -> str:
    """Return the text for the limits that are set for one user."""
    texts = {
        "GPUs at once": limits.max_gpus,
        "GPU-hours in 7 days": None if limits.gpu_hours_per_week is None else f"{limits.gpu_hours_per_week:g}",
        "waiting requests": limits.max_waiting,
        "jobs": limits.max_jobs,
        "longest lease": None if limits.longest_lease_s is None else format_span(limits.longest_lease_s),
    }
    return ", ".join(f"{name} {value}" for name, value in texts.items() if value is not None)


def describe_holdings(leases: Sequence[LeaseView], waiting: LeaseView, models: Sequence[str]) -> str:
    """Return what the owner of a waiting lease holds already, and what frees it; empty for nothing.

    Args:
        leases: leases that have not ended, of any owner.
        waiting: the lease that waits.
        models: the models that it can get; empty for any.
    """
    held = [
        lease
        for lease in leases
        if lease.owner == waiting.owner
        and lease.state in {LeaseState.GRANTED, LeaseState.ACTIVE}
        and any(not models or gpu.model in models for gpu in lease.gpus)
    ]
    if not held:
        return ""
    parts = [f"{_describe_holder(lease)} ({', '.join(lease.nodes)}: {describe_gpus(lease.gpus)})" for lease in held]
    remedies = []
    if any(lease.purpose is Purpose.NOTEBOOK for lease in held):
        remedies.append("The Home page stops notebooks.")
    if any(lease.purpose is Purpose.JOB for lease in held):
        remedies.append(
            "%gpu_status in a notebook and `gpu-launch ps` list jobs; %gpu_cancel and `gpu-launch cancel` end them."
        )
    return f"You hold GPUs yourself that this notebook could use: {'; '.join(parts)}. {' '.join(remedies)}"


def _describe_holder(lease: LeaseView) -> str:
    if lease.purpose is Purpose.JOB:
        return "a job"
    return f"notebook {lease.subject!r}" if lease.subject else "your default notebook"


def capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


def describe_placing(lease: LeaseView) -> str:
    """Return a text such as `Placed on rig1: RTX 5090`, with the broker's note."""
    text = f"Placed on {lease.nodes[0]}: {describe_gpus(lease.gpus)}"
    return f"{text} ({lease.note})" if lease.note else text


def describe_gpus(gpus: Sequence[LeasedGpuView]) -> str:
    """Return a text such as `2 × RTX 5090`, `1/4 of RTX 5090 (8 GiB cap: a promise, not a wall)`, or `no GPU`."""
    counted = Counter(_describe_gpu(gpu) for gpu in gpus)
    parts = [model if count == 1 else f"{count} × {model}" for model, count in counted.items()]
    return ", ".join(parts) or "no GPU"


def _describe_gpu(gpu: LeasedGpuView) -> str:
    if gpu.share == 1:
        return gpu.model
    return f"1/{gpu.share} of {gpu.model} ({describe_cap(gpu.memory_mib // gpu.share)})"


def describe_cap(cap_mib: int) -> str:
    """Return the text for the memory cap of a GPU share."""
    return f"{describe_gib(cap_mib)} GiB cap: a promise, not a wall"


def describe_gib(mib: int) -> str:
    """Return MiB as GiB in a short form: `31.8`, `8`, `141`."""
    gib = mib / 1024
    return f"{gib:.0f}" if gib >= 100 else f"{gib:.3g}"


def describe_outside(gpu: GpuView) -> str:
    """Return a text such as `in use outside gpuhub: pid 4242, 5.1 GiB`."""
    if not gpu.outside:
        return gpu.message or "in use outside gpuhub"
    parts = [
        f"pid {process.pid}"
        if process.memory_mib is None
        else f"pid {process.pid}, {process.memory_mib / 1024:.1f} GiB"
        for process in gpu.outside
    ]
    return f"in use outside gpuhub: {'; '.join(parts)}"


def describe_partition(partition: PartitionView) -> str:
    """Return a partition's limits, such as `up to 8 h, 1 h by default; 2 nodes at most`."""
    longest, default, most = partition.longest_s, partition.usual_s, partition.most_nodes
    times = ["no time limit" if longest is None else f"up to {format_span(longest)}"]
    if default is not None and default != longest:
        times.append(f"{format_span(default)} by default")
    parts = [", ".join(times)]
    if most is not None:
        parts.append(f"{most} node{'s' if most > 1 else ''} at most")
    if not partition.is_up:
        parts.append("down: nothing starts there")
    return "; ".join(parts)


def describe_kinds(kinds: Sequence[GpuModelView]) -> str:
    """Return a text such as `1 of 2 RTX 5090 · 0 of 1 RTX 5070`."""
    return " · ".join(f"{kind.free:,} of {kind.total:,} {kind.model}" for kind in kinds) or "no GPU"


def describe_node(node: NodeView) -> str:
    """Return a text such as `driver 570.86.15 · switch s1 · 2 leases · only for members of vision`."""
    labelled = (("driver", node.driver), ("switch", node.switch), ("rack", node.rack))
    parts = [f"{what} {value}" for what, value in labelled if value is not None]
    if node.circuit is not None:
        parts.append(node.circuit.describe())
    if node.bench is not None:
        parts.append(describe_bench(node.bench))
    if node.leases:
        parts.append(f"{node.leases} lease{'s' if node.leases > 1 else ''}")
    if node.owner is not None:
        parts.append(f"{node.owner}'s machine")
    if node.groups:
        parts.append(describe_access(node.groups))
    return " · ".join(parts)


def describe_bench(bench: NodeBenchView) -> str:
    """Return a text such as `measured 61.2 TFLOP/s, 2.30 to 2.35 Gbit/s to other nodes`."""
    rates = list(dict.fromkeys(map(format_bits, bench.link_bytes_s or ())))
    network = f", {' to '.join(rates)} with another node" if rates else ""
    return f"measured {format_flops(bench.flops)}{network}"


def describe_time(when: datetime) -> str:
    """Return hours and minutes in the local time zone, with the date unless it is today."""
    local = when.astimezone()
    is_today = local.date() == datetime.now(local.tzinfo).date()
    return local.strftime("%H:%M") if is_today else f"{local.day} {local.strftime('%b %H:%M')}"


#: States of nodes that the queue wakes when it needs them.
SLEEPING = frozenset({NodeState.ASLEEP, NodeState.WAKING})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTotals:
    """Totals of a cluster's nodes, GPUs and waiting requests."""

    nodes: int
    #: Nodes that take no work, without those that sleep or wake.
    nodes_unavailable: int
    gpus: int
    free: int
    held: int
    #: GPUs that are neither free nor held, without those of nodes that sleep or wake.
    gpus_unusable: int
    waiting: int
    #: GPUs of nodes that sleep or wake.
    gpus_asleep: int = 0
    #: With Slurm: free and all GPUs by model.
    kinds: Sequence[GpuModelView] = ()


def count_totals(view: ClusterView | None) -> ClusterTotals | None:
    """Return the totals of a view, or None while the broker does not answer."""
    if view is None:
        return None
    states = Counter(
        # A GPU of an external Slurm job counts as held.
        GpuState.HELD if is_held_by_external_job(gpu) else gpu.state
        for node in view.nodes
        for gpu in node.gpus
    )
    free, held = states[GpuState.FREE], states[GpuState.HELD]
    asleep = sum(len(node.gpus) for node in view.nodes if node.state in SLEEPING)
    return ClusterTotals(
        nodes=len(view.nodes),
        nodes_unavailable=sum(node.state not in {NodeState.UP, *SLEEPING} for node in view.nodes),
        gpus=states.total(),
        free=free,
        held=held,
        gpus_unusable=states.total() - free - held - asleep,
        gpus_asleep=asleep,
        waiting=view.waiting,
        kinds=count_models(gpu for node in view.nodes for gpu in node.gpus) if view.capabilities.external_jobs else (),
    )


def is_held_by_external_job(gpu: GpuView) -> bool:
    """Return whether an external Slurm job holds the GPU."""
    return gpu.state is GpuState.OUTSIDE and gpu.holder is not None and gpu.holder.is_outside


def build_card(gpu: GpuView) -> GpuSpec:
    """Return the properties of a view's GPU that placement uses."""
    return GpuSpec(
        model=gpu.model,
        memory_mib=gpu.memory_mib,
        capability=None if gpu.capability is None else parse_capability(gpu.capability),
        is_mig=gpu.is_mig,
    )


def eligible_nodes(view: ClusterView, profile: ProfileSettings) -> list[str]:
    """Return the nodes that answer and could ever run the profile, which need its image."""
    requirement = gpu_requirement(profile)
    return [
        node.name
        for node in view.nodes
        if node.state is NodeState.UP
        and node.is_open
        and requirement.accepts_driver(node.driver)
        and sum(requirement.accepts(build_card(gpu)) for gpu in node.gpus) >= profile.gpu_count
    ]
