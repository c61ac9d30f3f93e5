"""The views of nodes and their GPUs."""

from __future__ import annotations

from dataclasses import replace

from gpuhub.backends.interface import ExternalUsage
from gpuhub.broker.views import serializers
from gpuhub.broker.views.gpu_summary import ClusterViewInput, GpuSummary
from gpuhub.broker_api.schemas import CircuitView, GpuState, GpuView, NodeState, NodeView, OutsideProcess
from gpuhub.common.node_access import find_request_groups
from gpuhub.nodes import gpu_health
from gpuhub.nodes.inventory import GpuReading, NodeStatus
from gpuhub.nodes.status import Cordon, GpuLeaseStatus
from gpuhub.scheduler.interface import CircuitBudget

_UNLEASED = GpuLeaseStatus()


def build_node(inputs: ClusterViewInput, record: NodeStatus, gpus: GpuSummary, leases: int) -> NodeView:
    """Return the view of one node, and add its free GPUs to `gpus`."""
    cordon = inputs.cordons.get(record.name)
    condition = gpu_health.assess_node(
        inputs.inventory,
        record.name,
        cordon=cordon,
        monotonic=inputs.monotonic,
        scheduling=inputs.cluster.scheduling,
    )
    condition = _add_external_node(inputs.external, record.name, condition)
    described = inputs.inventory.configured_nodes[record.name]
    return NodeView(
        name=record.name,
        state=condition.state,
        message=condition.message,
        gpus=tuple(_build_gpu(inputs, record, gpu, gpus, cordon) for gpu in record.gpus),
        driver=record.driver,
        switch=described.switch,
        rack=described.rack,
        leases=leases,
        groups=tuple(sorted(described.groups)),
        is_open=described.admits(inputs.groups),
        owner=inputs.cluster.node(record.name).owner,
        takes_scavenging=described.admits(find_request_groups(inputs.groups, scavenge=True)),
        guest=inputs.cluster.node(record.name).guest,
        takes_guests=inputs.cluster.node(record.name).guest
        and described.admits(find_request_groups(inputs.groups, scavenge=False, guests=True)),
        circuit=_build_circuit(described.circuit, gpus),
        bench=inputs.bench.get(record.name),
        power=None if record.power is None else serializers.build_power(record.power),
    )


def _build_circuit(circuit: CircuitBudget | None, gpus: GpuSummary) -> CircuitView | None:
    usage = None if circuit is None else gpus.circuits.get(circuit.name)
    if circuit is None or usage is None:
        return None
    return CircuitView(name=circuit.name, taken_watts=usage.taken_watts, gpu_watts=usage.gpu_watts)


def _add_circuits(gpu: GpuReading, gpus: GpuSummary, condition: gpu_health.GpuCondition) -> gpu_health.GpuCondition:
    """Return the condition of a GPU, free only if its circuit can supply it as well."""
    for name, usage in gpus.circuits.items() if condition.state is GpuState.FREE else ():
        if gpu.uuid in usage.unsupplied:
            left = max(0, usage.gpu_watts - usage.taken_watts)
            message = (
                f"circuit {name!r} has {left:,} W of {usage.gpu_watts:,} W for GPUs left, and it needs "
                f"{gpu.power_limit_w or 0.0:,.0f} W"
            )
            return gpu_health.GpuCondition(state=GpuState.UNAVAILABLE, message=message)
    return condition


def _build_gpu(
    inputs: ClusterViewInput, record: NodeStatus, gpu: GpuReading, gpus: GpuSummary, cordon: Cordon | None
) -> GpuView:
    leases = gpus.held.get(gpu.uuid, ())
    condition = gpu_health.assess_gpu(
        inputs.inventory,
        record.name,
        gpu,
        is_held=bool(leases),
        is_quarantined=gpu.uuid in gpus.quarantined,
        cordon=cordon,
        lease_status=inputs.lease_statuses.get(gpu.uuid, _UNLEASED),
        monotonic=inputs.monotonic,
        scheduling=inputs.cluster.scheduling,
    )
    condition = _add_external_gpu(inputs.external, record.name, gpu.uuid, condition)
    condition = _add_circuits(gpu, gpus, condition)
    if condition.state is GpuState.FREE:
        gpus.free.add(gpu.uuid)
    is_fresh = record.is_fresh(inputs.monotonic)
    holders = tuple([gpus.holders[lease.id] for lease in leases])
    if condition.state is GpuState.OUTSIDE and gpu.uuid in gpus.outside:
        holders = (gpus.outside[gpu.uuid],)
    return GpuView(
        uuid=gpu.uuid,
        node=record.name,
        index=gpu.index,
        model=gpu.model,
        memory_mib=gpu.memory_mib,
        state=condition.state,
        holder=holders[0] if holders else None,
        holders=holders,
        share=gpus.shares.get(gpu.uuid, 1),
        is_mig=gpu.is_mig,
        capability=None if gpu.capability is None else ".".join(map(str, gpu.capability)),
        message=condition.message,
        outside=tuple([OutsideProcess(pid=one.pid, memory_mib=one.memory_mib) for one in condition.outside_processes]),
        reservation=gpus.reserved.get(gpu.uuid),
        power_w=gpu.power_w if is_fresh else None,
        temperature_c=gpu.temperature_c if is_fresh else None,
        utilisation_percent=gpu.utilisation_percent if is_fresh else None,
        memory_used_mib=gpu.memory_used_mib if is_fresh else None,
    )


def _add_external_gpu(
    external: ExternalUsage, node: str, uuid: str, condition: gpu_health.GpuCondition
) -> gpu_health.GpuCondition:
    """Return the condition of a GPU without a lease: an external job may have it, or its node may get no work."""
    job, reason = external.gpus.get(uuid), external.unavailable.get(node)
    if job is not None and condition.state in {GpuState.FREE, GpuState.OUTSIDE}:
        return replace(condition, state=GpuState.OUTSIDE, message=job.text)
    if reason is not None and condition.state is GpuState.FREE:
        return replace(condition, state=GpuState.UNAVAILABLE, message=reason)
    return condition


def _add_external_node(
    external: ExternalUsage, node: str, condition: gpu_health.NodeCondition
) -> gpu_health.NodeCondition:
    """Return the condition of a node; one that answers and gets no work from the backend counts as cordoned."""
    reason = external.unavailable.get(node)
    if reason is None or condition.state is not NodeState.UP:
        return condition
    message = "; ".join(text for text in (reason, condition.message) if text)
    return gpu_health.NodeCondition(state=NodeState.CORDONED, message=message)
