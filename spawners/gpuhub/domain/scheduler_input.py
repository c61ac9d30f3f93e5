"""Leases as input for a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuhub.broker_api.schemas import JobState, LeaseState, SuspensionState
from gpuhub.common.gpu import GpuRequirement, GpuSpec
from gpuhub.common.node_access import find_request_groups
from gpuhub.config.containers.container_size import LEAST_CPU_MILLI
from gpuhub.domain import lease_states, suspension
from gpuhub.domain.models import JobRow, LeasedGpu, LeaseRow
from gpuhub.scheduler.interface import Allocation, GpuSlot, NodeAllocation, SchedulingRequest

#: Suffix of the allocation id for the CPU and memory that a suspended lease's container still uses.
HOST_SUFFIX = "/host"


def list_values(lease: LeaseRow, job: JobRow | None) -> tuple[SchedulingRequest | Allocation, ...]:
    """Return what the scheduler has to know of a lease; nothing if it has ended, or waits for other jobs."""
    if not lease.is_open or lease.is_held:
        return ()
    if lease.state is LeaseState.REQUESTED:
        return (build_request(lease),)
    if not suspension.is_without_gpu(lease):
        return (build_allocation(lease, job),)
    host = build_host_allocation(lease, job)
    return (build_resume_request(lease), host) if lease.waits and not _ends_soon(lease, job) else (host,)


def build_resume_request(lease: LeaseRow) -> SchedulingRequest:
    """Return the request of a suspended notebook or job for the GPU that it was suspended on; it has the rest."""
    since = lease.created_at if lease.suspension is None else lease.suspension.since
    left_s = None if lease.expires_at is None else max(1.0, lease.expires_at - since)
    if lease.suspension is not None and lease.suspension.left_s is not None:
        left_s = lease.suspension.left_s
    return replace(
        build_request(lease),
        bundle=None,
        created_at=since,
        requirement=GpuRequirement(uuid=lease.gpus[0].uuid),
        exclude=frozenset(),
        exclusive=False,
        time_limit_s=left_s,
        cpu_milli=0,
        memory_mib=0,
        cpu_by_gpu=False,
        memory_by_gpu=False,
    )


def build_host_allocation(lease: LeaseRow, job: JobRow | None) -> Allocation:
    """Return what a suspended notebook or job holds: its memory with what was on the GPU, and little CPU.

    Its programs wait. After it has gone on, its node may have containers with more CPU in all than it has cores.
    """
    node, size = lease.nodes[0], lease.find_size(lease.nodes[0])
    cpu_milli = find_suspended_cpu_milli(lease)
    moved_mib = 0 if lease.suspension is None else lease.suspension.moved_mib
    memory_mib = size.memory_mib + moved_mib
    request = replace(
        build_request(lease),
        id=f"{lease.id}{HOST_SUFFIX}",
        bundle=None,
        gpus_per_node=0,
        requirement=GpuRequirement(),
        exclusive=False,
        cpu_milli=cpu_milli,
        memory_mib=memory_mib,
        cpu_by_gpu=False,
        memory_by_gpu=False,
    )
    held = NodeAllocation(node=node, slots=(), cpu_milli=cpu_milli, memory_mib=memory_mib)
    return Allocation(
        request=request,
        node_allocations=(held,),
        granted_at=lease.charged_from,
        ends_at=lease.expires_at,
        is_ending=_ends_soon(lease, job),
    )


def find_suspended_cpu_milli(lease: LeaseRow) -> int:
    """Return the CPU that a notebook or job counts with while it is suspended, thousandths of a core."""
    return min(lease.find_size(lease.nodes[0]).cpu_milli, LEAST_CPU_MILLI)


def build_request(lease: LeaseRow) -> SchedulingRequest:
    """Return the request of a waiting lease."""
    resources = lease.resources
    return SchedulingRequest(
        id=lease.id,
        owner=lease.owner,
        groups=find_request_groups(lease.groups, scavenge=resources.scavenge, guests=resources.guests),
        created_at=lease.created_at,
        seq=lease.seq,
        nodes=resources.nodes,
        least_nodes=resources.least_nodes,
        gpus_per_node=resources.gpus_per_node,
        spread=resources.spread,
        requirement=resources.requirement,
        share=resources.share,
        exclude=frozenset(resources.exclude),
        exclusive=resources.exclusive,
        same_model=resources.same_model,
        batch=resources.batch,
        scavenge=resources.scavenge,
        priority=resources.priority,
        time_limit_s=lease.time_limit_s,
        cpu_milli=resources.cpu_milli,
        memory_mib=resources.memory_mib,
        cpu_by_gpu=resources.cpu_by_gpu,
        memory_by_gpu=resources.memory_by_gpu,
        slurm_job=lease.slurm_job,
        bundle=None if resources.bundle is None else f"{lease.owner}/{resources.bundle}",
    )


def build_allocation(lease: LeaseRow, job: JobRow | None) -> Allocation:
    """Return what a lease holds; `job` is the job that it is for, if any."""
    request = build_request(lease)
    if suspension.find_state(lease) is SuspensionState.RESTORING:
        # It cannot be preempted while its memory is being moved.
        request = replace(request, scavenge=False)
    return Allocation(
        request=request,
        node_allocations=_build_node_allocations(lease),
        granted_at=lease.charged_from,
        ends_at=lease.expires_at,
        is_ending=_ends_soon(lease, job),
        is_quarantined=lease.state is LeaseState.QUARANTINED,
        shrinking=frozenset(gpu.node for gpu in lease.held if gpu.shrink_requested_at is not None),
        leader=lease.nodes[0] if job is not None and job.detached else None,
    )


def _ends_soon(lease: LeaseRow, job: JobRow | None) -> bool:
    """Return whether a lease releases what it has: it ends, or its job is preempted or suspended."""
    is_suspending = job is not None and suspension.find_state(lease) is SuspensionState.SUSPENDING
    is_leaving = job is not None and job.state in {JobState.PREEMPTING, JobState.STOPPING}
    return lease.state in lease_states.ENDING or is_leaving or is_suspending


def _build_node_allocations(lease: LeaseRow) -> tuple[NodeAllocation, ...]:
    if not lease.gpus:
        return tuple(_build_node_allocation(lease, node, ()) for node in lease.nodes)
    by_node: dict[str, list[GpuSlot]] = {}
    for gpu in lease.held:
        by_node.setdefault(gpu.node, []).append(_build_slot(gpu))
    return tuple(_build_node_allocation(lease, node, slots) for node, slots in by_node.items())


def _build_node_allocation(lease: LeaseRow, node: str, slots: Sequence[GpuSlot]) -> NodeAllocation:
    size = lease.sizes.get(node)
    return NodeAllocation(
        node=node,
        slots=tuple(slots),
        cpu_milli=None if size is None else size.cpu_milli,
        memory_mib=None if size is None else size.memory_mib,
    )


def _build_slot(gpu: LeasedGpu) -> GpuSlot:
    card = GpuSpec(model=gpu.model, memory_mib=gpu.memory_mib)
    return GpuSlot(uuid=gpu.uuid, node=gpu.node, index=gpu.index, card=card)
