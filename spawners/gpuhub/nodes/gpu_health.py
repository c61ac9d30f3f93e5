"""Health of nodes and GPUs: which can be granted, and the reasons why others cannot. Times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuhub.broker_api.schemas import GpuState, NodeState
from gpuhub.config.settings import SchedulingSettings
from gpuhub.nodes import status
from gpuhub.nodes.agent import DEVICES_LOST, HARDWARE_SLOWDOWN
from gpuhub.nodes.gpu_faults import describe_faults
from gpuhub.nodes.inventory import Inventory
from gpuhub.nodes.power_status import PowerState, describe_power
from gpuhub.nodes.status import Cordon, GpuFault, GpuLeaseStatus, GpuProcess, GpuReading, NodeStatus

_UNLEASED = GpuLeaseStatus()
_AGENT_SILENT = "its GPU agent is silent"
#: Causes of a slowdown by their bits in the clocks' event reasons.
_SLOWDOWN_CAUSES = {0x40: "it is too hot", 0x80: "its power supply slows it down"}
_NOT_YET_CHECKED = "its last lease ended a moment ago; a reading must show first that it is empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCondition:
    """A node's state, and its problems if there are any."""

    state: NodeState
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCondition:
    """A GPU's state, its problem if there is one, and the processes on it that belong to no lease."""

    state: GpuState
    message: str | None = None
    outside_processes: tuple[GpuProcess, ...] = ()


# -- for the scheduler -------------------------------------------------------------------------------------------------


def explain_node_unavailable(node: NodeStatus, cordon: Cordon | None) -> str | None:
    """Return why the node takes no new work, for users, or None if it does."""
    if not node.is_up or node.is_put_to_sleep:
        return _describe_silence(node)
    if cordon is not None:
        return status.describe_cordon(cordon)
    if node.daemon_id is None:
        return "its Docker daemon has not been identified yet"
    if node.firewall_error is not None:
        return node.firewall_error
    if node.disk_error is not None:
        return node.disk_error
    return None if node.is_reconciled else "containers that belong to no lease are being removed"


def _describe_silence(node: NodeStatus) -> str | None:
    """Return why a node does not answer; that it sleeps, or was not woken, comes before the silence of its daemon."""
    return (None if node.power is None else describe_power(node.power)) or node.unreachable_reason


def explain_gpu_unavailable(
    inventory: Inventory,
    node: NodeStatus,
    gpu: GpuReading,
    *,
    lease_status: GpuLeaseStatus,
    monotonic: float,
    scheduling: SchedulingSettings,
) -> str | None:
    """Return why a GPU on a node that takes work is not available, or None if it is."""
    return (
        find_reading_problem(inventory, node, gpu, monotonic)
        or find_node_gpu_failure(node, gpu)
        or describe_slowdown(gpu)
        or describe_outside_use(node, gpu, lease_status=lease_status, scheduling=scheduling)
    )


# -- one GPU -----------------------------------------------------------------------------------------------------------


def find_reading_problem(inventory: Inventory, node: NodeStatus, gpu: GpuReading, monotonic: float) -> str | None:
    """Return why a GPU's last reading cannot be trusted, or None if it can."""
    if node.gpu_error is not None:
        return add_advice(node.gpu_error)
    if not node.is_fresh(monotonic):
        return "its GPUs have not been read yet" if node.read_at is None else _AGENT_SILENT
    return _describe_duplicate(inventory, gpu)


def find_gpu_failure(gpu: GpuReading) -> str | None:
    """Return the defect that the last reading of a GPU shows, or None."""
    if gpu.error is not None:
        return add_advice(gpu.error)
    if gpu.ecc_uncorrected:
        count = f"{gpu.ecc_uncorrected} uncorrectable memory error{'s' if gpu.ecc_uncorrected > 1 else ''} (ECC)"
        return f"{count} since the driver was loaded: reset the GPU or restart the node"
    if gpu.remap_failed:
        return "a failing memory row could not be replaced: the card needs service"
    return "failing memory rows wait to be replaced: reset the GPU or restart the node" if gpu.remap_pending else None


def find_node_gpu_failure(node: NodeStatus, gpu: GpuReading) -> str | None:
    """Return the defect of a GPU, by its last reading or by what was noticed before and is not over; None for none."""
    return find_gpu_failure(gpu) or describe_faults(node.faults.get(gpu.whole_uuid, ()))


def describe_slowdown(gpu: GpuReading) -> str | None:
    """Return why the hardware has lowered a GPU's clocks for minutes, or None if it has not."""
    if not gpu.is_throttled:
        return None
    reasons = (gpu.clocks_event_reasons or 0) & HARDWARE_SLOWDOWN
    causes = [text for bit, text in _SLOWDOWN_CAUSES.items() if reasons & bit]
    why = f" ({', '.join(causes)})" if causes else ""
    return f"its clocks have been lowered by the hardware for minutes{why}: check its cooling and power supply"


def find_new_problems(before: NodeStatus, after: NodeStatus, began: Iterable[GpuFault]) -> dict[str, str]:
    """Return the defects and slowdowns that were not there at the reading before, by UUID of GPU or MIG device.

    Args:
        before: The node as it was read before.
        after: The node as last read.
        began: Faults that were noticed for the first time.
    """
    known = {gpu.uuid: _describe_problem(before, gpu) for gpu in before.gpus}
    faulty = {fault.gpu for fault in began}
    problems = {}
    for gpu in after.gpus:
        problem = _describe_problem(after, gpu)
        # The first reading of a run shows problems that were reported by the run before.
        is_new = before.read_at is not None and gpu.uuid in known and known[gpu.uuid] is None
        if problem is not None and (is_new or gpu.whole_uuid in faulty):
            problems[gpu.uuid] = problem
    return problems


def _describe_problem(node: NodeStatus, gpu: GpuReading) -> str | None:
    return find_node_gpu_failure(node, gpu) or describe_slowdown(gpu)


def list_lease_problems(nodes: Mapping[str, NodeStatus], uuids: Mapping[str, str]) -> tuple[str, ...]:
    """Return the defects and slowdowns of GPUs, for the owner of their lease.

    Args:
        nodes: All nodes by name.
        uuids: The UUIDs of the lease's GPUs or MIG devices, with the name of each one's node.
    """
    problems = []
    for uuid, name in uuids.items():
        node = nodes.get(name)
        gpu = None if node is None else next((gpu for gpu in node.gpus if gpu.uuid == uuid), None)
        if node is None or gpu is None or not node.is_up:
            continue
        problem = _describe_problem(node, gpu)
        if problem is not None:
            problems.append(f"GPU {gpu.index} ({gpu.model}) of {name}: {problem}")
    return tuple(problems)


def describe_outside_use(
    node: NodeStatus, gpu: GpuReading, *, lease_status: GpuLeaseStatus, scheduling: SchedulingSettings
) -> str | None:
    """Return how a GPU without a lease is in use, or None if it is not.

    A reading from before the end of the last lease was proven may still show that lease: the GPU does not count as used
    from outside then, but it is not available before a later reading shows it empty.
    """
    if lease_status.leased or not is_in_use(node, gpu, scheduling):
        return None
    if lease_status.freed_at is not None and not node.is_read_after(lease_status.freed_at):
        return _NOT_YET_CHECKED
    games = list_games(node, gpu)
    if games:
        pids = ", ".join(str(process.pid) for process in games)
        return f"in use outside gpuhub: {_describe_use(gpu)}; a large program on the desktop (pid {pids})"
    return f"in use outside gpuhub: {_describe_use(gpu)}"


def is_in_use(node: NodeStatus, gpu: GpuReading, scheduling: SchedulingSettings) -> bool:
    """Return whether processes run on the GPU, or more memory is in use than an idle GPU has.

    The programs of a desktop do not count, unless one has as much memory as a game has. Where NVML does not report a
    program's memory, it counts as other memory in use.
    """
    if gpu.processes or list_games(node, gpu):
        return True
    desktop = 0 if node.desktop_mib is None else sum(process.memory_mib or 0 for process in gpu.graphics or ())
    return ((gpu.memory_used_mib or 0) - desktop) * 1024**2 > scheduling.outside_memory


def list_games(node: NodeStatus, gpu: GpuReading) -> tuple[GpuProcess, ...]:
    """Return the programs that have more memory than one of the node's desktop may have; none without a desktop."""
    if node.desktop_mib is None:
        return ()
    return tuple(process for process in gpu.graphics or () if (process.memory_mib or 0) > node.desktop_mib)


def is_awaiting_reading(
    node: NodeStatus, *, lease_statuses: Mapping[str, GpuLeaseStatus], scheduling: SchedulingSettings
) -> bool:
    """Return whether a GPU on the node is unavailable until the next reading."""
    return any(
        describe_outside_use(node, gpu, lease_status=lease_statuses.get(gpu.uuid, _UNLEASED), scheduling=scheduling)
        == _NOT_YET_CHECKED
        for gpu in node.gpus
    )


def add_advice(error: str) -> str:
    """Return NVML's text, with a remedy if one is known."""
    if "version mismatch" in error.lower():
        return f"{error}: the driver was upgraded while it was in use, reboot needed"
    return f"{error}: restart your server" if error == DEVICES_LOST else error


def _describe_use(gpu: GpuReading) -> str:
    parts = []
    if gpu.processes:
        plural = "es" if len(gpu.processes) > 1 else ""
        parts.append(f"{len(gpu.processes)} process{plural}")
    if gpu.memory_used_mib is not None:
        mib = gpu.memory_used_mib
        parts.append(f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib} MiB")
    return ", ".join(parts)


def explain_unknown_power(inventory: Inventory, name: str, gpu: GpuReading) -> str | None:
    """Return that NVML does not report a GPU's power limit, which an enforced circuit needs; None if it need not."""
    circuit = inventory.configured_nodes[name].circuit
    if circuit is None or gpu.power_limit_w is not None:
        return None
    return f"NVML reports no power limit for it, so that circuit {circuit.name!r} may not be enough"


# -- for users ---------------------------------------------------------------------------------------------------------


def assess_gpu(
    inventory: Inventory,
    name: str,
    gpu: GpuReading,
    *,
    is_held: bool = False,
    is_quarantined: bool = False,
    cordon: Cordon | None = None,
    lease_status: GpuLeaseStatus = _UNLEASED,
    monotonic: float,
    scheduling: SchedulingSettings,
) -> GpuCondition:
    """Return the condition of a GPU on the node `name`; `assess_node` covers problems of the node itself.

    A defect comes first, then the holder, then use without a lease.
    """
    node = inventory.nodes[name]
    held = GpuState.QUARANTINED if is_quarantined else GpuState.HELD
    if not node.is_up or node.is_put_to_sleep:
        state = GpuState.QUARANTINED if is_quarantined else GpuState.UNAVAILABLE
        return GpuCondition(state=state, message=explain_node_unavailable(node, None))
    defect = None if node.read_at is None else find_node_gpu_failure(node, gpu)
    if defect is None and node.read_at is not None and not node.is_fresh(monotonic):
        defect = _AGENT_SILENT
    if defect is not None:
        return GpuCondition(state=GpuState.FAILED, message=defect)
    if is_held or is_quarantined:
        return GpuCondition(state=held, message=describe_slowdown(gpu))
    reading_problem = find_reading_problem(inventory, node, gpu, monotonic)
    if reading_problem is not None:
        return GpuCondition(state=GpuState.UNAVAILABLE, message=reading_problem)
    condition = _assess_unheld_gpu(node, gpu, lease_status=lease_status, cordon=cordon, scheduling=scheduling)
    unknown_power = explain_unknown_power(inventory, name, gpu)
    if condition.state is GpuState.FREE and unknown_power is not None:
        return GpuCondition(state=GpuState.UNAVAILABLE, message=unknown_power)
    return condition


def _assess_unheld_gpu(
    node: NodeStatus,
    gpu: GpuReading,
    *,
    lease_status: GpuLeaseStatus,
    cordon: Cordon | None,
    scheduling: SchedulingSettings,
) -> GpuCondition:
    outside_use = describe_outside_use(node, gpu, lease_status=lease_status, scheduling=scheduling)
    if outside_use is not None and outside_use != _NOT_YET_CHECKED:
        processes = (*(gpu.processes or ()), *list_games(node, gpu))
        return GpuCondition(state=GpuState.OUTSIDE, message=outside_use, outside_processes=processes)
    why = explain_node_unavailable(node, cordon) or outside_use or describe_slowdown(gpu)
    return GpuCondition(state=GpuState.FREE if why is None else GpuState.UNAVAILABLE, message=why)


def assess_node(
    inventory: Inventory, name: str, *, cordon: Cordon | None = None, monotonic: float, scheduling: SchedulingSettings
) -> NodeCondition:
    """Return the condition of a node. A missing answer comes before a cordon."""
    node = inventory.nodes[name]
    cordon_text = None if cordon is None else status.describe_cordon(cordon)
    if node.is_put_to_sleep and node.power is not None:
        return NodeCondition(
            state=NodeState.WAKING if node.power.state is PowerState.WAKING else NodeState.ASLEEP,
            message="; ".join(text for text in (describe_power(node.power), cordon_text) if text),
        )
    if not node.is_up:
        has_failed = node.power is not None and node.power.state is PowerState.FAILED
        is_down = node.down_since is not None and monotonic - node.down_since >= scheduling.down_after
        return NodeCondition(
            state=NodeState.DOWN if is_down or has_failed else NodeState.UNREACHABLE,
            message="; ".join(text for text in (_describe_silence(node), cordon_text) if text),
        )
    message = (
        "; ".join(text for text in (cordon_text, *_list_node_problems(inventory, node, monotonic)) if text) or None
    )
    if cordon is None:
        return NodeCondition(state=NodeState.UP, message=message)
    return NodeCondition(state=NodeState.DRAINING if cordon.is_draining else NodeState.CORDONED, message=message)


def _list_node_problems(inventory: Inventory, node: NodeStatus, monotonic: float) -> list[str]:
    """Return the problems of a node that answers: its own, else its agent's, else its GPUs'."""
    problems = ["another Docker daemon answers than when leases there began"] if node.is_suspect else []
    if node.firewall_error is not None:
        problems.append(node.firewall_error)
    if node.disk_error is not None:
        problems.append(node.disk_error)
    if node.gpu_error is not None:
        return [*problems, add_advice(node.gpu_error)]
    broken = [
        f"GPU {gpu.index}: {why}"
        for gpu in node.gpus
        if (why := find_node_gpu_failure(node, gpu)) or (why := _describe_duplicate(inventory, gpu))
    ]
    if broken:
        return [*problems, *dict.fromkeys(broken)]
    if not node.is_fresh(monotonic):
        return [*problems, "its GPUs have not been read yet" if node.read_at is None else _AGENT_SILENT]
    why = explain_node_unavailable(node, None)
    if why is not None:
        return list(dict.fromkeys([*problems, why]))
    return problems if node.gpus else [*problems, "has no GPU"]


def _describe_duplicate(inventory: Inventory, gpu: GpuReading) -> str | None:
    if gpu.uuid not in inventory.duplicate_uuids:
        return None
    return f"{' and '.join(inventory.nodes_reporting(gpu.uuid))} report the same GPU {gpu.uuid}: are they one machine?"
