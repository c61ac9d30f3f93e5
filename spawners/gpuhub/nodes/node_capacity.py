"""The capacity of nodes for the scheduler: which of their GPUs can be granted. Times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from gpuhub.config.settings import SchedulingSettings
from gpuhub.nodes.gpu_health import explain_gpu_unavailable, explain_node_unavailable, explain_unknown_power
from gpuhub.nodes.inventory import Inventory
from gpuhub.nodes.machine_size import add_machine_size
from gpuhub.nodes.power_status import PowerState
from gpuhub.nodes.status import Cordon, GpuLeaseStatus
from gpuhub.scheduler.interface import GpuSlot, NodeCapacity

_UNLEASED = GpuLeaseStatus()


def build_node_capacity(
    inventory: Inventory,
    name: str,
    *,
    cordon: Cordon | None,
    lease_statuses: Mapping[str, GpuLeaseStatus],
    monotonic: float,
    scheduling: SchedulingSettings,
) -> NodeCapacity:
    """Return one node with its GPUs. A GPU that two nodes report is listed for the first and available on neither."""
    node = inventory.nodes[name]
    node_reason = explain_node_unavailable(node, cordon)
    slots = []
    for gpu in node.gpus:
        if gpu.uuid in inventory.duplicate_uuids and inventory.nodes_reporting(gpu.uuid)[0] != name:
            continue
        lease_status = lease_statuses.get(gpu.uuid, _UNLEASED)
        reason = (
            node_reason
            or explain_gpu_unavailable(
                inventory, node, gpu, lease_status=lease_status, monotonic=monotonic, scheduling=scheduling
            )
            or explain_unknown_power(inventory, name, gpu)
        )
        slots.append(
            GpuSlot(
                uuid=gpu.uuid,
                node=name,
                index=gpu.index,
                card=replace(gpu.card, awaited_as=gpu.uuid) if lease_status.is_awaited else gpu.card,
                available=reason is None,
                unavailable_reason=reason,
                watts=None if gpu.power_limit_w is None else ceil(gpu.power_limit_w),
                parent=gpu.parent,
            )
        )
    capacity = replace(
        inventory.configured_nodes[name],
        slots=tuple(slots),
        takes_work=node_reason is None,
        unavailable_reason=node_reason,
        is_waking=node.power is not None and node.power.state is PowerState.WAKING,
        usual_wake_s=None if node.power is None else node.power.usual_wake_s,
        driver=node.driver,
    )
    if not inventory.counts_machines:
        return capacity
    return add_machine_size(capacity, node.machine, inventory.notebook_room, len(slots))


def build_awake_capacity(
    inventory: Inventory,
    name: str,
    *,
    cordon: Cordon | None,
    lease_statuses: Mapping[str, GpuLeaseStatus],
    monotonic: float,
    scheduling: SchedulingSettings,
) -> NodeCapacity:
    """Return the capacity that a sleeping node has once it is awake and its GPUs are shown to be empty.

    Defects that were noticed before, a cordon and a full disk remain. A power limit that was never read counts as 0:
    it is read once the node is awake, which takes no more power than is counted already.
    """
    node = inventory.nodes[name]
    gpus = tuple(
        replace(
            gpu,
            processes=None,
            graphics=None,
            memory_used_mib=None,
            is_throttled=False,
            power_limit_w=gpu.power_limit_w or 0.0,
        )
        for gpu in node.gpus
    )
    awake = node.evolve(
        is_up=True,
        power=None,
        daemon_id="awake",
        is_reconciled=True,
        gpus=gpus,
        gpu_error=None,
        firewall_error=None,
        read_at=monotonic,
    )
    return build_node_capacity(
        inventory.with_node(awake),
        name,
        cordon=cordon,
        lease_statuses=lease_statuses,
        monotonic=monotonic,
        scheduling=scheduling,
    )
