"""Leases as input for a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from gpuhub.broker_api.schemas import JobState, LeaseState
from gpuhub.common.gpu import GpuSpec
from gpuhub.common.node_access import find_request_groups
from gpuhub.domain import lease_states
from gpuhub.domain.models import JobRow, LeasedGpu, LeaseRow
from gpuhub.scheduler.interface import Allocation, GpuSlot, NodeAllocation, SchedulingRequest


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
    )


def build_allocation(lease: LeaseRow, job: JobRow | None) -> Allocation:
    """Return what a lease holds; `job` is the job that it is for, if any."""
    ends_soon = job is not None and job.state in {JobState.PREEMPTING, JobState.STOPPING}
    return Allocation(
        request=build_request(lease),
        node_allocations=_build_node_allocations(lease),
        granted_at=lease.granted_at if lease.granted_at is not None else lease.created_at,
        ends_at=lease.expires_at,
        is_ending=lease.state in lease_states.ENDING or ends_soon,
        is_quarantined=lease.state is LeaseState.QUARANTINED,
        shrinking=frozenset(gpu.node for gpu in lease.held if gpu.shrink_requested_at is not None),
        leader=lease.nodes[0] if job is not None and job.detached else None,
    )


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
