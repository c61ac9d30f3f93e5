"""What is known of the nodes and their GPUs: values, how a reading changes them, and nothing else. Pure.

Times are monotonic seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from gpuhub import gpus
from gpuhub.engines.base import Slot
from gpuhub.gpus import Card
from gpuhub.settings import Cluster

#: A node is unreachable after so many failed readings in a row.
FAILURES = 3
#: A GPU reading older than this is no base for a grant, seconds.
STALE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """A GPU as NVML last told; None where it could not tell."""

    uuid: str
    index: int
    model: str
    memory_mib: int
    #: Why it cannot be used, for a person.
    error: str | None = None
    #: The driver still lists it.
    is_listed: bool = True
    utilisation_percent: int | None = None
    memory_used_mib: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    processes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReading:
    """One line of a node's GPU agent."""

    n: int
    error: str | None
    gpus: tuple[GpuReading, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node at one moment."""

    name: str
    #: Its Docker daemon answers.
    is_up: bool = False
    failures: int = 0
    #: Why the daemon does not answer, for a person.
    trouble: str | None = "has not been read yet"
    #: Every container of ours there belongs to an open lease: nothing unknown can hold a GPU.
    is_settled: bool = False
    gpus: tuple[GpuReading, ...] = ()
    #: GPUs were read at some time, now or in an earlier run of the broker.
    is_known: bool = False
    #: The last line's number and when it was first seen; None before the first line of this run.
    line: int | None = None
    read_at: float | None = None
    #: Why its GPUs cannot be read, for a person.
    gpu_trouble: str | None = None

    def evolve(self, **changes: Any) -> Self:
        """A copy with changes."""
        return replace(self, **changes)

    def takes_work(self) -> bool:
        """Whether containers can be put there."""
        return self.is_up and self.is_settled

    def is_fresh(self, now: float) -> bool:
        """Whether the last GPU reading can be trusted."""
        return self.read_at is not None and now - self.read_at <= STALE_S


@dataclass(frozen=True, slots=True)
class Inventory:
    """All nodes of the settings, in their order."""

    nodes: Mapping[str, NodeRecord]
    #: What the administrator expects, for nodes never read.
    expected: Mapping[str, tuple[Card, ...] | None]

    def with_node(self, record: NodeRecord) -> Inventory:
        """A copy with one node replaced."""
        return Inventory({**self.nodes, record.name: record}, self.expected)

    def slots(self, now: float) -> tuple[Slot, ...]:
        """Every known GPU once; one that two nodes report is available on neither."""
        twice = self.doubled()
        found: dict[str, Slot] = {}
        for node in self.nodes.values():
            usable = node.takes_work() and node.is_fresh(now)
            for gpu in node.gpus:
                found.setdefault(
                    gpu.uuid,
                    Slot(
                        uuid=gpu.uuid,
                        node=node.name,
                        index=gpu.index,
                        card=Card(model=gpu.model, memory_mib=gpu.memory_mib),
                        available=usable and gpu.error is None and gpu.uuid not in twice,
                    ),
                )
        return tuple(found.values())

    def doubled(self) -> frozenset[str]:
        """UUIDs that more than one node reports."""
        seen: set[str] = set()
        twice: set[str] = set()
        for node in self.nodes.values():
            for gpu in node.gpus:
                (twice if gpu.uuid in seen else seen).add(gpu.uuid)
        return frozenset(twice)

    def cards(self) -> dict[str, tuple[Card, ...] | None]:
        """The cards of every node, reachable or not; None where nobody knows yet."""
        return {
            name: tuple(Card(model=gpu.model, memory_mib=gpu.memory_mib) for gpu in node.gpus)
            if node.is_known
            else self.expected[name]
            for name, node in self.nodes.items()
        }

    def message(self, name: str, now: float) -> str | None:
        """What is wrong with a node, for a person; None when nothing is."""
        node = self.nodes[name]
        if not node.is_up:
            return node.trouble
        if node.gpu_trouble is not None:
            return node.gpu_trouble
        return self._gpu_message(node, now)

    def _gpu_message(self, node: NodeRecord, now: float) -> str | None:
        doubled = sorted(self.doubled() & {gpu.uuid for gpu in node.gpus})
        if doubled:
            return f"another node reports the same GPU {doubled[0]}"
        broken = [f"GPU {gpu.index}: {gpu.error}" for gpu in node.gpus if gpu.error]
        if broken:
            return "; ".join(broken)
        if not node.is_fresh(now):
            return "its GPUs have not been read yet" if node.read_at is None else "its GPU agent is silent"
        if not node.is_settled:
            return "containers that belong to no lease are being removed"
        return None if node.gpus else "has no GPU"


def start_inventory(cluster: Cluster, seen: Mapping[str, Sequence[GpuReading]]) -> Inventory:
    """Before the first reading: what an earlier run saw, and what the settings say."""
    return Inventory(
        nodes={
            node.name: NodeRecord(name=node.name, gpus=tuple(seen.get(node.name, ())), is_known=node.name in seen)
            for node in cluster.nodes
        },
        expected={
            node.name: None
            if node.gpus is None
            else tuple(
                Card(model=gpus.short_model(card.model), memory_mib=card.memory // 1024**2)
                for card in node.gpus
                for _ in range(card.count)
            )
            for node in cluster.nodes
        },
    )


def answered(node: NodeRecord) -> NodeRecord:
    """The daemon answered: the node is up at once."""
    return node.evolve(is_up=True, failures=0, trouble=None)


def failed(node: NodeRecord, trouble: str) -> NodeRecord:
    """The daemon did not answer: after some such readings the node counts as unreachable."""
    failures = node.failures + 1
    if failures < FAILURES and node.is_up:
        return node.evolve(failures=failures)
    # What happened there meanwhile is unknown: it must be looked at before it gets work again.
    return node.evolve(is_up=False, failures=failures, trouble=trouble, is_settled=False)


def agent_failed(node: NodeRecord, trouble: str) -> NodeRecord:
    """The agent cannot be run or read."""
    return node.evolve(gpu_trouble=trouble, read_at=None)


def agent_read(node: NodeRecord, reading: AgentReading, now: float) -> NodeRecord:
    """A line of the agent, new or seen before."""
    if reading.n == node.line and node.gpu_trouble is None:
        return node
    node = node.evolve(line=reading.n, read_at=now, gpu_trouble=reading.error)
    if reading.error is not None:
        return node.evolve(gpus=tuple(replace(gpu, error=reading.error) for gpu in node.gpus))
    return node.evolve(gpus=_merge(node.gpus, reading.gpus), is_known=True)


def parse_agent_line(line: bytes) -> AgentReading | None:
    """The agent's last line (format: see `agent`); None when it is empty or cut off."""
    try:
        raw = json.loads(line.decode("utf-8").strip() or "null")
        if raw is None:
            return None
        return AgentReading(n=int(raw["n"]), error=raw["error"], gpus=tuple(_parse_gpu(gpu) for gpu in raw["gpus"]))
    except (ValueError, KeyError, TypeError):
        return None


def _parse_gpu(raw: Mapping[str, Any]) -> GpuReading:
    return GpuReading(
        uuid=raw.get("uuid") or "",
        index=int(raw["index"]),
        model=gpus.short_model(raw.get("name") or ""),
        memory_mib=int(raw.get("memory_total_mib") or 0),
        error=raw["error"],
        utilisation_percent=raw.get("utilisation_percent"),
        memory_used_mib=raw.get("memory_used_mib"),
        power_w=raw.get("power_w"),
        temperature_c=raw.get("temperature_c"),
        processes=raw.get("processes"),
    )


def _merge(known: Sequence[GpuReading], read: Iterable[GpuReading]) -> tuple[GpuReading, ...]:
    """New readings over what was known: a GPU that fails, or is no longer listed, is kept and named as failed."""
    by_uuid = {gpu.uuid: gpu for gpu in known}
    by_index = {gpu.index: gpu for gpu in known}
    merged: dict[str, GpuReading] = {}
    for gpu in read:
        old = by_uuid.get(gpu.uuid) or by_index.get(gpu.index)
        if gpu.error is not None and old is not None:
            merged[old.uuid] = replace(old, error=gpu.error, is_listed=True)
        elif gpu.uuid:
            merged[gpu.uuid] = gpu
    for uuid, gpu in by_uuid.items():
        if uuid not in merged:
            merged[uuid] = replace(gpu, error="the driver no longer reports it", is_listed=False)
    return tuple(sorted(merged.values(), key=lambda gpu: gpu.index))
