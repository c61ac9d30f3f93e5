"""The scheduler's time for a decision, from a closet to 8,000 GPUs, and its memory."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from math import log2
from pathlib import Path

from gpuhub.common.gpu import GpuRequirement, GpuSpec
from gpuhub.scheduler.interface import GpuSlot, NodeCapacity, SchedulerSnapshot, SchedulingParameters, SchedulingRequest
from gpuhub.scheduler.scheduler import BuiltinScheduler

SIZES = (3, 30, 300, 1000)
GPUS_PER_NODE = 8
DECISIONS = 2000
WAITING = 10_000
OWNERS = 200
NOW = 1_700_000_000.0
HOUR = 3600.0
CARDS = (
    GpuSpec(model="RTX 5070", memory_mib=12227, capability=(12, 0)),
    GpuSpec(model="RTX 5090", memory_mib=32607, capability=(12, 0)),
    GpuSpec(model="A100", memory_mib=81920, capability=(8, 0)),
    GpuSpec(model="H100", memory_mib=81559, capability=(9, 0)),
    GpuSpec(model="H200", memory_mib=143771, capability=(9, 0)),
)
#: Demands and their weights: nodes, GPUs on each, requirement.
SHAPES: tuple[tuple[int, dict[str, object]], ...] = (
    (30, {}),
    (10, {"requirement": GpuRequirement(models=("RTX 5090",))}),
    (10, {"requirement": GpuRequirement(least_memory_mib=24 * 1024)}),
    (8, {"requirement": GpuRequirement(models=("H100", "H200"))}),
    (8, {"gpus_per_node": 2}),
    (6, {"gpus_per_node": 4, "requirement": GpuRequirement(least_memory_mib=80_000)}),
    (6, {"gpus_per_node": 8}),
    (4, {"gpus_per_node": 8, "requirement": GpuRequirement(least_capability=(9, 0))}),
    (3, {"gpus_per_node": 8, "nodes": 2, "least_nodes": 2}),
    (2, {"gpus_per_node": 8, "nodes": 4, "least_nodes": 4}),
    (1, {"gpus_per_node": 8, "nodes": 8, "least_nodes": 8, "same_model": True}),
    (2, {"gpus_per_node": 1, "nodes": 4, "least_nodes": 2}),
    (2, {"spread": 16}),
    (6, {"share": 4}),
    (2, {"exclusive": True}),
)
LIMITS = (HOUR, 4 * HOUR, 24 * HOUR, None)


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield the figures of the group `decisions`."""
    middle: dict[int, float] = {}
    for nodes in SIZES:
        gpus = nodes * GPUS_PER_NODE
        load = Load(nodes)
        yield f"broker.engine_grants_per_s_{gpus}gpus", load.fill(), "1/s"
        times = load.decide(DECISIONS)
        middle[nodes] = statistics.median(times)
        p99 = statistics.quantiles(times, n=100)[98]
        yield f"broker.decision_p50_ms_{gpus}gpus", middle[nodes] * 1e3, "ms"
        yield f"broker.decision_p99_ms_{gpus}gpus", p99 * 1e3, "ms"
        if nodes == SIZES[-1]:
            yield "broker.decision_p99_ms", p99 * 1e3, "ms"
    # Between clusters of 30 and of 1,000 nodes, each with its queue; 1 is growth as n log n.
    grown = 1000 * log2(1000) / (30 * log2(30))
    yield "broker.decision_growth", middle[1000] / middle[30] / grown, "of n log n"
    yield "broker.memory_mb", _memory_mb(), "MB"


class Load:
    """A fully leased cluster with a queue of constant length, where one lease after another ends."""

    def __init__(self, nodes: int) -> None:
        self.random = random.Random(nodes)
        self.now = NOW
        self.made = 0
        self.waiting = max(60, WAITING * nodes // SIZES[-1])
        self.held: list[str] = []
        self.engine = BuiltinScheduler(SchedulingParameters())
        self.engine.rebuild(SchedulerSnapshot(nodes=[_node(number) for number in range(nodes)]))

    def add_request(self) -> None:
        """Add a request."""
        (shape,) = self.random.choices([shape for _, shape in SHAPES], weights=[often for often, _ in SHAPES])
        self.made += 1
        self.engine.put_request(
            SchedulingRequest(
                **{"id": f"r{self.made}", **shape},  # type: ignore[arg-type]
                owner=f"user{self.random.randrange(OWNERS)}",
                created_at=self.now,
                seq=self.made,
                time_limit_s=self.random.choice(LIMITS),
                batch=self.random.random() < 0.7,
            )
        )

    def fill(self) -> float:
        """Fill the empty cluster from the queue in one decision; return grants per second."""
        for _ in range(self.waiting):
            self.now += 0.5
            self.add_request()
        begin = time.perf_counter()
        grants = self.engine.decide(self.now).grants
        rate = len(grants) / (time.perf_counter() - begin)
        self.held += grants
        for _ in grants:
            self.add_request()
        self.engine.decide(self.now)
        return rate

    def decide(self, count: int) -> list[float]:
        """Return the seconds of `count` decisions: half of them after a lease's end, half after a new request."""
        times = []
        for number in range(count):
            self.now += self.random.expovariate(1.0)
            begin = time.perf_counter()
            if number % 2 and self.held:
                index = self.random.randrange(len(self.held))
                self.held[index], self.held[-1] = self.held[-1], self.held[index]
                self.engine.remove(self.held.pop(), self.now)
            else:
                self.add_request()
            self.held += self.engine.decide(self.now).grants
            times.append(time.perf_counter() - begin)
        return times


def _node(number: int) -> NodeCapacity:
    name, card = f"n{number:04}", CARDS[number % len(CARDS)]
    slots = tuple(GpuSlot(uuid=f"{name}-{i}", node=name, index=i, card=card) for i in range(GPUS_PER_NODE))
    return NodeCapacity(name=name, slots=slots, switch=f"s{number // 16}", rack=f"r{number // 64}", driver="575.1")


def _memory_mb() -> float:
    """Return the growth in MB of a fresh process that has the largest state."""
    command = [sys.executable, "-c", "from tests.bench.scheduling import print_memory; print_memory()"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    return float(done.stdout)


def print_memory() -> None:
    """Fill the largest cluster, decide repeatedly, and print the process's growth in MB."""
    before = _resident_mb()
    load = Load(SIZES[-1])
    load.fill()
    load.decide(500)
    print(_resident_mb() - before)


def _resident_mb() -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise LookupError("/proc/self/status has no line VmRSS")
