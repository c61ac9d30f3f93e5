"""Whether nodes and their GPUs can be given, and why not, for a person. Pure; times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuhub.broker import cordons as cordon_rules
from gpuhub.broker.cordons import Cordon
from gpuhub.broker.schemas import GpuState, NodeState
from gpuhub.engines.base import NodeSupply, Slot
from gpuhub.nodes.agent import DEVICES_LOST
from gpuhub.nodes.inventory import Inventory
from gpuhub.nodes.records import GpuReading, Guard, NodeRecord, Process
from gpuhub.settings import Scheduling

_UNLEASED = Guard()
_SILENT = "its GPU agent is silent"
_UNCHECKED = "its last lease ended a moment ago; it waits for a reading that shows it empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCondition:
    """A node's state, and what is wrong with it; None when nothing is."""

    state: NodeState
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCondition:
    """A GPU's state, what is wrong with it (None when nothing is), and the processes there that are nobody's lease."""

    state: GpuState
    message: str | None = None
    outside: tuple[Process, ...] = ()


# -- for the engine ----------------------------------------------------------------------------------------------------


def build_supply(
    inventory: Inventory,
    *,
    cordons: Mapping[str, Cordon],
    guards: Mapping[str, Guard],
    monotonic: float,
    scheduling: Scheduling,
) -> tuple[NodeSupply, ...]:
    """Every node of the settings with its GPUs; who holds them is not said here."""
    return tuple(
        build_node_supply(
            inventory, name, cordon=cordons.get(name), guards=guards, monotonic=monotonic, scheduling=scheduling
        )
        for name in inventory.nodes
    )


def build_node_supply(
    inventory: Inventory,
    name: str,
    *,
    cordon: Cordon | None,
    guards: Mapping[str, Guard],
    monotonic: float,
    scheduling: Scheduling,
) -> NodeSupply:
    """One node with its GPUs. A GPU that two nodes report is the first one's, and given on neither."""
    node = inventory.nodes[name]
    trouble = why_no_work(node, cordon)
    slots = []
    for gpu in node.gpus:
        if gpu.uuid in inventory.doubled and inventory.reporting(gpu.uuid)[0] != name:
            continue
        guard = guards.get(gpu.uuid, _UNLEASED)
        why = trouble or why_not_given(inventory, node, gpu, guard=guard, monotonic=monotonic, scheduling=scheduling)
        slots.append(Slot(uuid=gpu.uuid, node=name, index=gpu.index, card=gpu.card, available=why is None, trouble=why))
    return replace(
        inventory.described[name],
        slots=tuple(slots),
        takes_work=trouble is None,
        trouble=trouble,
        driver=node.driver,
    )


def why_no_work(node: NodeRecord, cordon: Cordon | None) -> str | None:
    """Why nothing new can be put on the node, for a person; None when it can."""
    if not node.is_up:
        return node.trouble
    if cordon is not None:
        return cordon_rules.describe(cordon)
    if node.daemon_id is None:
        return "its Docker daemon has not said who it is yet"
    if node.filter_trouble is not None:
        return node.filter_trouble
    return None if node.is_settled else "containers that belong to no lease are being removed"


def why_not_given(
    inventory: Inventory, node: NodeRecord, gpu: GpuReading, *, guard: Guard, monotonic: float, scheduling: Scheduling
) -> str | None:
    """Why a GPU is not given on a node that takes work; None when it is."""
    return (
        why_unread(inventory, node, gpu, monotonic)
        or why_failed(gpu)
        or why_outside(node, gpu, guard=guard, scheduling=scheduling)
    )


# -- one GPU -----------------------------------------------------------------------------------------------------------


def why_unread(inventory: Inventory, node: NodeRecord, gpu: GpuReading, monotonic: float) -> str | None:
    """Why what is known of a GPU cannot be trusted; None when it can."""
    if node.gpu_trouble is not None:
        return with_advice(node.gpu_trouble)
    if not node.is_fresh(monotonic):
        return "its GPUs have not been read yet" if node.read_at is None else _SILENT
    return _why_doubled(inventory, gpu)


def why_failed(gpu: GpuReading) -> str | None:
    """What is broken in the last reading of a GPU; None when nothing is."""
    if gpu.error is not None:
        return with_advice(gpu.error)
    if gpu.ecc_uncorrected:
        count = f"{gpu.ecc_uncorrected} uncorrectable memory error{'s' if gpu.ecc_uncorrected > 1 else ''} (ECC)"
        return f"{count} since the driver was loaded: reset the GPU or restart the node"
    return "a failing memory row could not be replaced: the card needs service" if gpu.remap_failed else None


def why_outside(node: NodeRecord, gpu: GpuReading, *, guard: Guard, scheduling: Scheduling) -> str | None:
    """How a GPU that nobody leases is in use; None when it is not.

    A reading from before the last lease's end was proven tells of that lease: it is held against nobody, but a GPU
    that was in use then is not given before a later reading shows it empty.
    """
    if guard.leased or not is_in_use(gpu, scheduling):
        return None
    if guard.freed_at is not None and not node.is_read_after(guard.freed_at):
        return _UNCHECKED
    return f"in use outside gpuhub: {_describe_use(gpu)}"


def is_in_use(gpu: GpuReading, scheduling: Scheduling) -> bool:
    """Whether there are processes on it, or more memory in use than an idle GPU has."""
    return bool(gpu.processes) or (gpu.memory_used_mib or 0) * 1024**2 > scheduling.outside_memory


def awaits_reading(node: NodeRecord, *, guards: Mapping[str, Guard], scheduling: Scheduling) -> bool:
    """Whether a GPU there is kept back until the next reading."""
    return any(
        why_outside(node, gpu, guard=guards.get(gpu.uuid, _UNLEASED), scheduling=scheduling) == _UNCHECKED
        for gpu in node.gpus
    )


def with_advice(error: str) -> str:
    """NVML's words, with what to do about it where that is known."""
    if "version mismatch" in error.lower():
        return f"{error}: the driver was upgraded while it was in use, reboot needed"
    return f"{error}: restart your server" if error == DEVICES_LOST else error


def _describe_use(gpu: GpuReading) -> str:
    parts = []
    if gpu.processes:
        many = "es" if len(gpu.processes) > 1 else ""
        parts.append(f"{len(gpu.processes)} process{many}")
    if gpu.memory_used_mib is not None:
        mib = gpu.memory_used_mib
        parts.append(f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib} MiB")
    return ", ".join(parts)


# -- for people --------------------------------------------------------------------------------------------------------


def gpu_state(
    inventory: Inventory,
    name: str,
    gpu: GpuReading,
    *,
    is_held: bool = False,
    is_quarantined: bool = False,
    cordon: Cordon | None = None,
    guard: Guard = _UNLEASED,
    monotonic: float,
    scheduling: Scheduling,
) -> GpuCondition:
    """A GPU of the node `name` as the page shows it; the node's own trouble is `node_state`'s to tell.

    What is broken comes first; then who holds it; then who uses it without a lease.
    """
    node = inventory.nodes[name]
    held = GpuState.QUARANTINED if is_quarantined else GpuState.HELD
    if not node.is_up:
        state = GpuState.QUARANTINED if is_quarantined else GpuState.UNAVAILABLE
        return GpuCondition(state=state, message=node.trouble)
    broken = None if node.read_at is None else why_failed(gpu)
    if broken is None and node.read_at is not None and not node.is_fresh(monotonic):
        broken = _SILENT
    if broken is not None:
        return GpuCondition(state=GpuState.FAILED, message=broken)
    if is_held or is_quarantined:
        return GpuCondition(state=held)
    unread = why_unread(inventory, node, gpu, monotonic)
    if unread is not None:
        return GpuCondition(state=GpuState.UNAVAILABLE, message=unread)
    return _unheld(node, gpu, guard=guard, cordon=cordon, scheduling=scheduling)


def _unheld(
    node: NodeRecord, gpu: GpuReading, *, guard: Guard, cordon: Cordon | None, scheduling: Scheduling
) -> GpuCondition:
    used = why_outside(node, gpu, guard=guard, scheduling=scheduling)
    if used is not None and used != _UNCHECKED:
        return GpuCondition(state=GpuState.OUTSIDE, message=used, outside=gpu.processes or ())
    why = why_no_work(node, cordon) or used
    return GpuCondition(state=GpuState.FREE if why is None else GpuState.UNAVAILABLE, message=why)


def node_state(
    inventory: Inventory, name: str, *, cordon: Cordon | None = None, monotonic: float, scheduling: Scheduling
) -> NodeCondition:
    """A node as the page shows it. That it does not answer is told before that it is cordoned."""
    node = inventory.nodes[name]
    told = None if cordon is None else cordon_rules.describe(cordon)
    if not node.is_up:
        is_down = node.down_since is not None and monotonic - node.down_since >= scheduling.down_after
        return NodeCondition(
            state=NodeState.DOWN if is_down else NodeState.UNREACHABLE,
            message="; ".join(text for text in (node.trouble, told) if text),
        )
    message = "; ".join(text for text in (told, *_troubles(inventory, node, monotonic)) if text) or None
    if cordon is None:
        return NodeCondition(state=NodeState.UP, message=message)
    return NodeCondition(state=NodeState.DRAINING if cordon.is_draining else NodeState.CORDONED, message=message)


def _troubles(inventory: Inventory, node: NodeRecord, monotonic: float) -> list[str]:
    """What is wrong on a node that answers: with it, else with its agent, else with its GPUs."""
    suspect = ["another Docker daemon answers than when leases there began"] if node.is_suspect else []
    if node.filter_trouble is not None:
        suspect.append(node.filter_trouble)
    if node.gpu_trouble is not None:
        return [*suspect, with_advice(node.gpu_trouble)]
    broken = [
        f"GPU {gpu.index}: {why}"
        for gpu in node.gpus
        if (why := why_failed(gpu)) or (why := _why_doubled(inventory, gpu))
    ]
    if broken:
        return [*suspect, *dict.fromkeys(broken)]
    if not node.is_fresh(monotonic):
        return [*suspect, "its GPUs have not been read yet" if node.read_at is None else _SILENT]
    why = why_no_work(node, None)
    if why is not None:
        return list(dict.fromkeys([*suspect, why]))
    return suspect if node.gpus else [*suspect, "has no GPU"]


def _why_doubled(inventory: Inventory, gpu: GpuReading) -> str | None:
    if gpu.uuid not in inventory.doubled:
        return None
    return f"{' and '.join(inventory.reporting(gpu.uuid))} report the same GPU {gpu.uuid}: are they one machine?"
