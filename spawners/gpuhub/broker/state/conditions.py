"""Knowledge about leases that GPU health and proofs depend on, and reports of changed conditions."""

from __future__ import annotations

from collections.abc import Mapping

from gpuhub.broker_api.schemas import GpuState, LeaseState, NodeState
from gpuhub.config.settings import SchedulingSettings
from gpuhub.domain import lease_states as rules
from gpuhub.domain.models import LedgerSnapshot
from gpuhub.nodes import gpu_health
from gpuhub.nodes.inventory import Inventory
from gpuhub.nodes.status import GpuLeaseStatus, GpuReading

_FREE = GpuLeaseStatus()


class GpuLeaseFlags:
    """Which GPUs are leased, and when each was last proven free, in monotonic seconds."""

    def __init__(self) -> None:
        self._holders: dict[str, set[str]] = {}
        self._statuses: dict[str, GpuLeaseStatus] = {}

    @property
    def by_uuid(self) -> Mapping[str, GpuLeaseStatus]:
        """Every GPU that was leased in this run."""
        return self._statuses

    def get_status(self, uuid: str) -> GpuLeaseStatus:
        return self._statuses.get(uuid, _FREE)

    def mark_held(self, uuid: str, lease: str) -> None:
        """Mark a GPU, or a share of it, as held by a lease; repeated calls change nothing."""
        self._holders.setdefault(uuid, set()).add(lease)
        self._statuses[uuid] = GpuLeaseStatus(leased=True, freed_at=self.get_status(uuid).freed_at)

    def mark_freed(self, uuid: str, lease: str, monotonic: float) -> None:
        """Mark a GPU as proven free of a lease; repeated calls change nothing."""
        holders = self._holders.get(uuid, set())
        if lease not in holders:
            return
        holders.remove(lease)
        self._statuses[uuid] = GpuLeaseStatus(leased=bool(holders), freed_at=monotonic)


class UnprovenLeases:
    """Leases for which a node's report proves nothing."""

    def __init__(self) -> None:
        #: The reason for people, by lease and node.
        self.reasons: dict[tuple[str, str], str] = {}

    def replace_node(self, node: str, reasons: Mapping[str, str]) -> list[str]:
        """Replace a node's reasons, by lease; return the leases that are new."""
        new = [lease for lease in reasons if (lease, node) not in self.reasons]
        kept = {key: why for key, why in self.reasons.items() if key[1] != node}
        self.reasons = kept | {(lease, node): why for lease, why in reasons.items()}
        return new


class ConditionReporter:
    """The last reported states of nodes and GPUs, so that each change is reported once."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeState] = {}
        self._gpus: dict[str, GpuState] = {}

    def report_changes(
        self,
        inventory: Inventory,
        name: str,
        *,
        lease_statuses: Mapping[str, GpuLeaseStatus],
        monotonic: float,
        scheduling: SchedulingSettings,
    ) -> list[tuple[str, str]]:
        """Return kind and text of each change on a node since the last call; a healthy start is not a change."""
        node_condition = gpu_health.assess_node(inventory, name, monotonic=monotonic, scheduling=scheduling)
        events = []
        if node_condition.state is not self._nodes.get(name, NodeState.UP):
            text = (
                "answers again"
                if node_condition.state is NodeState.UP
                else f"is {node_condition.state}: {node_condition.message}"
            )
            events.append((f"node.{node_condition.state}", f"node {name} {text}"))
        self._nodes[name] = node_condition.state
        if not inventory.nodes[name].is_up:
            return events
        for gpu in inventory.nodes[name].gpus:
            lease_status = lease_statuses.get(gpu.uuid, _FREE)
            condition = gpu_health.assess_gpu(
                inventory,
                name,
                gpu,
                is_held=lease_status.leased,
                lease_status=lease_status,
                monotonic=monotonic,
                scheduling=scheduling,
            )
            events += self._report_gpu_change(name, gpu, condition)
        return events

    def _report_gpu_change(
        self, node: str, gpu: GpuReading, condition: gpu_health.GpuCondition
    ) -> list[tuple[str, str]]:
        if condition.state is GpuState.UNAVAILABLE:
            return []
        before = self._gpus.get(gpu.uuid, GpuState.FREE)
        after = condition.state if condition.state in {GpuState.FAILED, GpuState.OUTSIDE} else GpuState.FREE
        self._gpus[gpu.uuid] = after
        if before is after:
            return []
        text = "can be used again" if after is GpuState.FREE else f"{condition.message}"
        kind = "gpu.healthy" if after is GpuState.FREE else f"gpu.{after}"
        return [(kind, f"GPU {gpu.index} ({gpu.model}) of {node}: {text}")]


def find_overdue_proofs(
    snapshot: LedgerSnapshot, inventory: Inventory, unproven: Mapping[tuple[str, str], str], now: float, limit_s: float
) -> Mapping[str, str]:
    """Return the releasing leases that lack proof for longer than `limit_s`, with the reason.

    Args:
        unproven: Why a node's report proves nothing, by lease and node.
    """
    overdue: dict[str, str] = {}
    for lease in snapshot.leases.values():
        if lease.state is LeaseState.RELEASING and now - lease.since >= limit_s:
            reasons = [
                _explain_missing_proof(inventory, lease.id, node, unproven) for node in rules.unproven_nodes(lease)
            ]
            overdue[lease.id] = "; ".join(reasons)
    return overdue


def _explain_missing_proof(inventory: Inventory, lease: str, node: str, unproven: Mapping[tuple[str, str], str]) -> str:
    record = inventory.nodes.get(node)
    if record is not None and not record.is_up:
        return f"node {node} does not answer, so what ran there may still run"
    return unproven.get((lease, node)) or f"its containers on {node} are not gone yet"
