"""All nodes of the settings together. Pure; times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuhub import gpus
from gpuhub.engines.base import NodeSupply
from gpuhub.gpus import Card
from gpuhub.nodes.records import GpuReading, NodeRecord
from gpuhub.settings import Cluster, Node

__all__ = ["GpuReading", "Inventory", "NodeRecord", "start_inventory"]


@dataclass(frozen=True, slots=True)
class Inventory:
    """All nodes of the settings, in their order."""

    nodes: Mapping[str, NodeRecord]
    #: What the administrator expects, for nodes never read.
    expected: Mapping[str, tuple[Card, ...] | None]
    #: What the settings say of each node, without what is read from it.
    described: Mapping[str, NodeSupply]
    #: UUIDs that more than one node reports.
    doubled: frozenset[str] = frozenset()

    def with_node(self, record: NodeRecord) -> Inventory:
        """A copy with one node replaced."""
        before = self.nodes[record.name]
        changed = replace(self, nodes={**self.nodes, record.name: record})
        if _reported(before) == _reported(record):
            return changed
        nodes = forget_moved(changed.nodes)
        return replace(changed, nodes=nodes, doubled=find_doubled(nodes.values()))

    def reporting(self, uuid: str) -> tuple[str, ...]:
        """The nodes that report a GPU, in the order of the settings."""
        return tuple(name for name, node in self.nodes.items() if any(gpu.uuid == uuid for gpu in node.gpus))

    def cards(self) -> dict[str, tuple[Card, ...] | None]:
        """The cards of every node, reachable or not; None where nobody knows yet."""
        return {
            name: tuple(gpu.card for gpu in node.gpus) if node.is_known else self.expected[name]
            for name, node in self.nodes.items()
        }


def find_doubled(nodes: Iterable[NodeRecord]) -> frozenset[str]:
    """UUIDs that more than one node reports: one card cannot be in two machines."""
    seen: set[str] = set()
    twice: set[str] = set()
    for node in nodes:
        for gpu in node.gpus:
            (twice if gpu.uuid in seen else seen).add(gpu.uuid)
    return frozenset(twice)


def forget_moved(nodes: Mapping[str, NodeRecord]) -> dict[str, NodeRecord]:
    """Without GPUs that a node no longer reports and another one does: the card was moved there."""
    listed = {gpu.uuid for node in nodes.values() for gpu in node.gpus if gpu.is_listed}
    return {
        name: node.evolve(gpus=tuple(gpu for gpu in node.gpus if gpu.is_listed or gpu.uuid not in listed))
        for name, node in nodes.items()
    }


def _reported(node: NodeRecord) -> list[tuple[str, bool]]:
    return [(gpu.uuid, gpu.is_listed) for gpu in node.gpus]


def start_inventory(cluster: Cluster, seen: Mapping[str, Sequence[GpuReading]]) -> Inventory:
    """Before the first reading: what an earlier run saw, and what the settings say."""
    nodes = {
        node.name: NodeRecord(name=node.name, gpus=tuple(seen.get(node.name, ())), is_known=node.name in seen)
        for node in cluster.nodes
    }
    return Inventory(
        nodes=nodes,
        expected={node.name: _expected(node) for node in cluster.nodes},
        described={
            node.name: NodeSupply(
                name=node.name,
                switch=node.switch,
                rack=node.rack,
                cpu_milli=None if node.cpus is None else round(node.cpus * 1000),
                memory_mib=None if node.memory is None else node.memory // 1024**2,
            )
            for node in cluster.nodes
        },
        doubled=find_doubled(nodes.values()),
    )


def _expected(node: Node) -> tuple[Card, ...] | None:
    if node.gpus is None:
        return None
    return tuple(
        Card(model=gpus.short_model(card.model), memory_mib=card.memory // 1024**2)
        for card in node.gpus
        for _ in range(card.count)
    )
