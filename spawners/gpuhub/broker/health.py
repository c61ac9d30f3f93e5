"""What the broker must know of leases to judge GPUs and proofs: pure bookkeeping and decisions."""

from __future__ import annotations

from collections.abc import Mapping

from gpuhub.broker import leases as rules
from gpuhub.broker.ledger import Snapshot
from gpuhub.broker.schemas import GpuState, LeaseState, NodeState
from gpuhub.nodes import health
from gpuhub.nodes.inventory import Inventory
from gpuhub.nodes.records import GpuReading, Guard
from gpuhub.settings import Scheduling

_FREE = Guard()


class Guards:
    """Which GPUs are leased, and when each was last proven free. Fed by the core; times are monotonic seconds."""

    def __init__(self) -> None:
        self._holders: dict[str, set[str]] = {}
        self._guards: dict[str, Guard] = {}

    @property
    def by_uuid(self) -> Mapping[str, Guard]:
        """Every GPU that was ever leased in this run."""
        return self._guards

    def of(self, uuid: str) -> Guard:
        """The guard of one GPU."""
        return self._guards.get(uuid, _FREE)

    def note_held(self, uuid: str, lease: str) -> None:
        """A lease holds the GPU or a part of it; said again, nothing changes."""
        self._holders.setdefault(uuid, set()).add(lease)
        self._guards[uuid] = Guard(leased=True, freed_at=self.of(uuid).freed_at)

    def note_freed(self, uuid: str, lease: str, monotonic: float) -> None:
        """There is proof that nothing of the lease is left on the GPU; said again, nothing changes."""
        holders = self._holders.get(uuid, set())
        if lease not in holders:
            return
        holders.remove(lease)
        self._guards[uuid] = Guard(leased=bool(holders), freed_at=monotonic)


class Doubts:
    """Leases about which a node's word proves nothing."""

    def __init__(self) -> None:
        #: By lease and node, the reason for a person.
        self.why: dict[tuple[str, str], str] = {}

    def replace(self, node: str, doubts: Mapping[str, str]) -> list[str]:
        """From now on these are the node's, by lease; returns the leases that are new."""
        new = [lease for lease in doubts if (lease, node) not in self.why]
        kept = {key: why for key, why in self.why.items() if key[1] != node}
        self.why = kept | {(lease, node): why for lease, why in doubts.items()}
        return new


class Conditions:
    """What was last told of nodes and GPUs, so that each change is told once."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeState] = {}
        self._gpus: dict[str, GpuState] = {}

    def news(
        self,
        inventory: Inventory,
        name: str,
        *,
        guards: Mapping[str, Guard],
        monotonic: float,
        scheduling: Scheduling,
    ) -> list[tuple[str, str]]:
        """Kind and text of what changed on one node since the last call; a healthy beginning is no news."""
        found = health.node_state(inventory, name, monotonic=monotonic, scheduling=scheduling)
        events = []
        if found.state is not self._nodes.get(name, NodeState.UP):
            told = "answers again" if found.state is NodeState.UP else f"is {found.state}: {found.message}"
            events.append((f"node.{found.state}", f"node {name} {told}"))
        self._nodes[name] = found.state
        if not inventory.nodes[name].is_up:
            return events
        for gpu in inventory.nodes[name].gpus:
            guard = guards.get(gpu.uuid, _FREE)
            condition = health.gpu_state(
                inventory, name, gpu, is_held=guard.leased, guard=guard, monotonic=monotonic, scheduling=scheduling
            )
            events += self._gpu_news(name, gpu, condition)
        return events

    def _gpu_news(self, node: str, gpu: GpuReading, condition: health.GpuCondition) -> list[tuple[str, str]]:
        if condition.state is GpuState.UNAVAILABLE:
            return []
        before = self._gpus.get(gpu.uuid, GpuState.FREE)
        after = condition.state if condition.state in {GpuState.FAILED, GpuState.OUTSIDE} else GpuState.FREE
        self._gpus[gpu.uuid] = after
        if before is after:
            return []
        told = "can be used again" if after is GpuState.FREE else f"{condition.message}"
        kind = "gpu.healthy" if after is GpuState.FREE else f"gpu.{after}"
        return [(kind, f"GPU {gpu.index} ({gpu.model}) of {node}: {told}")]


def overdue_proofs(
    snapshot: Snapshot, inventory: Inventory, doubts: Mapping[tuple[str, str], str], now: float, after: float
) -> Mapping[str, str]:
    """Releasing leases that lack proof for longer than `after` seconds, with why.

    `doubts` says by lease and node why a node's word proves nothing.
    """
    overdue: dict[str, str] = {}
    for lease in snapshot.leases.values():
        if lease.state is LeaseState.RELEASING and now - lease.since >= after:
            reasons = [_why_unproven(inventory, lease.id, node, doubts) for node in rules.unproven_nodes(lease)]
            overdue[lease.id] = "; ".join(reasons)
    return overdue


def _why_unproven(inventory: Inventory, lease: str, node: str, doubts: Mapping[tuple[str, str], str]) -> str:
    record = inventory.nodes.get(node)
    if record is not None and not record.is_up:
        return f"node {node} does not answer, so what ran there may still run"
    return doubts.get((lease, node)) or f"its containers on {node} are not gone yet"
