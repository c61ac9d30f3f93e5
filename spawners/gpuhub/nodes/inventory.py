"""The inventory: all nodes of the settings with their GPUs. Times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor

from gpuhub.common.gpu import GpuSpec, shorten_model
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.nodes.machine_size import NotebookRoom, find_notebook_room
from gpuhub.nodes.status import GpuReading, NodeStatus
from gpuhub.scheduler.interface import CircuitBudget, NodeCapacity

__all__ = ["GpuReading", "Inventory", "NodeStatus", "build_inventory"]


@dataclass(frozen=True, slots=True)
class Inventory:
    """All nodes of the settings, in their order."""

    nodes: Mapping[str, NodeStatus]
    #: Cards that the administrator expects, for nodes that were never read.
    expected_cards: Mapping[str, tuple[GpuSpec, ...] | None]
    #: Each node as the settings describe it.
    configured_nodes: Mapping[str, NodeCapacity]
    #: UUIDs that more than one node reports.
    duplicate_uuids: frozenset[str] = frozenset()
    #: Whether CPU and memory of the machines are counted; Slurm counts them itself.
    counts_machines: bool = True
    #: Room that each node with GPUs keeps for one notebook without GPU; None for none.
    notebook_room: NotebookRoom | None = None

    def with_node(self, record: NodeStatus) -> Inventory:
        """Return a copy with one node replaced."""
        before = self.nodes[record.name]
        changed = replace(self, nodes={**self.nodes, record.name: record})
        if _reported_gpus(before) == _reported_gpus(record):
            return changed
        nodes = drop_moved_gpus(changed.nodes)
        return replace(changed, nodes=nodes, duplicate_uuids=find_duplicates(nodes.values()))

    def nodes_reporting(self, uuid: str) -> tuple[str, ...]:
        """Return the nodes that report a GPU, in the order of the settings."""
        return tuple(name for name, node in self.nodes.items() if any(gpu.uuid == uuid for gpu in node.gpus))

    def list_foreign_uuids(self, node: str) -> frozenset[str]:
        """Return the UUIDs that other nodes report."""
        return frozenset(gpu.uuid for name, other in self.nodes.items() if name != node for gpu in other.gpus)

    def cards(self) -> dict[str, tuple[GpuSpec, ...] | None]:
        """Return the cards of every node, reachable or not; None where they are unknown."""
        return {
            name: tuple(gpu.card for gpu in node.gpus) if node.has_readings else self.expected_cards[name]
            for name, node in self.nodes.items()
        }


def find_duplicates(nodes: Iterable[NodeStatus]) -> frozenset[str]:
    """Return the UUIDs that more than one node reports, although a card cannot be in two machines."""
    seen: set[str] = set()
    duplicates: set[str] = set()
    for node in nodes:
        for gpu in node.gpus:
            (duplicates if gpu.uuid in seen else seen).add(gpu.uuid)
    return frozenset(duplicates)


def drop_moved_gpus(nodes: Mapping[str, NodeStatus]) -> dict[str, NodeStatus]:
    """Return the nodes without GPUs that were moved: one node no longer reports them, and another one does."""
    reported = {gpu.uuid for node in nodes.values() for gpu in node.gpus if gpu.is_listed}
    return {
        name: node.evolve(gpus=tuple(gpu for gpu in node.gpus if gpu.is_listed or gpu.uuid not in reported))
        for name, node in nodes.items()
    }


def _reported_gpus(node: NodeStatus) -> list[tuple[str, bool]]:
    return [(gpu.uuid, gpu.is_listed) for gpu in node.gpus]


def build_inventory(cluster: ClusterSettings, seen: Mapping[str, Sequence[GpuReading]]) -> Inventory:
    """Build the inventory before the first reading, from the settings and from what an earlier run read.

    GPUs of models that the settings no longer name for their node have been replaced, and are forgotten.
    """
    circuits = _build_circuits(cluster)
    remembered = {node.name: _list_remembered(node, seen.get(node.name, ())) for node in cluster.nodes}
    desktops = {node.name: node.desktop_memory // 1024**2 if node.desktop else None for node in cluster.nodes}
    nodes = {
        name: NodeStatus(
            name=name,
            gpus=gpus,
            has_readings=name in seen and (bool(gpus) or not seen[name]),
            desktop_mib=desktops[name],
        )
        for name, gpus in remembered.items()
    }
    return Inventory(
        nodes=nodes,
        expected_cards={node.name: _expected_cards(node) for node in cluster.nodes},
        configured_nodes={
            node.name: NodeCapacity(
                name=node.name,
                switch=node.switch,
                rack=node.rack,
                cpu_milli=None if node.cpus is None else round(node.cpus * 1000),
                memory_mib=None if node.memory is None else node.memory // 1024**2,
                groups=node.access_groups,
                circuit=circuits.get(node.name),
            )
            for node in cluster.nodes
        },
        duplicate_uuids=find_duplicates(nodes.values()),
        counts_machines=cluster.counts_machines,
        notebook_room=find_notebook_room(cluster),
    )


def _build_circuits(cluster: ClusterSettings) -> dict[str, CircuitBudget]:
    """Return the enforced circuit of each node that is on one."""
    budgets: dict[str, CircuitBudget] = {}
    for circuit in cluster.enforced_circuits:
        gpu_watts = floor(circuit.find_gpu_watts(cluster.base_watts[node] for node in circuit.nodes))
        budgets |= dict.fromkeys(circuit.nodes, CircuitBudget(name=circuit.name, gpu_watts=gpu_watts))
    return budgets


def _list_remembered(node: NodeSettings, seen: Sequence[GpuReading]) -> tuple[GpuReading, ...]:
    expected = _expected_cards(node)
    models = None if expected is None else {card.model for card in expected}
    return tuple(gpu for gpu in seen if models is None or gpu.card.model in models)


def _expected_cards(node: NodeSettings) -> tuple[GpuSpec, ...] | None:
    if node.gpus is None:
        return None
    return tuple(
        GpuSpec(model=shorten_model(card.model), memory_mib=card.memory // 1024**2)
        for card in node.gpus
        for _ in range(card.count)
    )
