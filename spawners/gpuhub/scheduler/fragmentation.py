"""Fragmentation: how much of a node's free GPUs will stay unused under a typical workload.

The question is not what fits a node now, but what is left of it once nothing more arrives that fits. Three estimates
are added, all in thousandths of a GPU:

* Each GPU alone (`estimate_fills`). Demands arrive at random in the workload's proportions; a demand that fits the free
  part of a GPU takes its share, and the rest waits for the next. That is a renewal equation over the 1,000 sizes of a
  free part, solved once per kind of card: 190 free thousandths are nearly worthless if the smallest popular share is
  320, and 350 are worth much. The same pass gives mean and variance of the CPU and memory that the demands take.
* All GPUs of a node together (`estimate_stranded`). Demands that fill them need CPU and memory; if the node probably
  lacks some of it, the same part of its GPUs stays unused. The need is taken as normally distributed, since it is a sum
  of many.
* GPUs that demands for several GPUs cannot use (`estimate_gang_waste`). Small demands fill every gap in the end, so for
  the first two estimates a node in use equals an empty one; but until then the large demands find no node. Each kind of
  large demand is put on the node's whole GPUs as often as it fits, and a part of the rest counts as waste.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gpuhub.common.gpu import GpuSpec
from gpuhub.scheduler.demand import UNLIMITED, WHOLE, NodeDemand

Workload = tuple[tuple[NodeDemand, float], ...]
#: Number of GPUs of each card.
Supply = Mapping[GpuSpec, int]

#: Demands for one whole GPU each: assumed for an unknown workload.
DEFAULT_WORKLOAD: Workload = ((NodeDemand(gpus=1), 1.0),)
#: A free part waits for about a hundred demands and is then given up: the chance, at each, that none follows. Without
#: it the rarest share would make every gap look useful. On the OpenB trace all values from 0.005 to 0.02 do equally
#: well.
_GIVE_UP_CHANCE = 0.01
#: Part of the GPUs unusable for multi-GPU demands that counts as waste, since other demands may still use them.
_GANG_WASTE_WEIGHT = 0.3
#: Beyond this number of standard deviations the tail of a shortage is ignored.
_MAX_DEVIATIONS = 6.0


@dataclass(frozen=True, slots=True)
class FillEstimate:
    """The expected use of a free part of one GPU; sums over the GPUs of a node are meaningful."""

    #: The unused and the used part, in thousandths of the GPU.
    waste: float = 0.0
    used: float = 0.0
    #: CPU that the demands on it take: mean in thousandths of a core, and variance.
    cpu: float = 0.0
    cpu_variance: float = 0.0
    #: Memory in MiB, likewise.
    memory: float = 0.0
    memory_variance: float = 0.0

    def __add__(self, other: FillEstimate) -> FillEstimate:
        return FillEstimate(
            self.waste + other.waste,
            self.used + other.used,
            self.cpu + other.cpu,
            self.cpu_variance + other.cpu_variance,
            self.memory + other.memory,
            self.memory_variance + other.memory_variance,
        )

    def __sub__(self, other: FillEstimate) -> FillEstimate:
        return FillEstimate(
            self.waste - other.waste,
            self.used - other.used,
            self.cpu - other.cpu,
            self.cpu_variance - other.cpu_variance,
            self.memory - other.memory,
            self.memory_variance - other.memory_variance,
        )


@dataclass(frozen=True, slots=True)
class _DemandSize:
    """All demands of a workload for one size of GPU share."""

    milli: int
    #: Its frequency among all demands for GPUs.
    chance: float
    #: Needs of one demand for each GPU: mean, and mean of the square.
    cpu: float
    cpu_square: float
    memory: float
    memory_square: float


def estimate_stranded(estimate: FillEstimate, cpu_milli: int, memory_mib: int) -> float:
    """Return the thousandths of a node's GPUs, summed up in `estimate`, that stay unused for lack of CPU or memory."""
    shortage = max(
        _expected_shortage(estimate.cpu, estimate.cpu_variance, cpu_milli),
        _expected_shortage(estimate.memory, estimate.memory_variance, memory_mib),
    )
    return shortage * estimate.used


def estimate_fills(workload: Workload, card: GpuSpec) -> tuple[FillEstimate, ...]:
    """Return the estimates for 0 to `WHOLE` free thousandths of a card."""
    requested = sum(demand.gpus * frequency for demand, frequency in workload)
    parts = tuple(
        (
            demand.milli,
            demand.gpus * frequency / requested,
            demand.cpu_milli / demand.gpus,
            demand.memory_mib / demand.gpus,
        )
        for demand, frequency in workload
        if demand.gpus and (demand.cards is None or card in demand.cards)
    )
    return _solve(parts)


@lru_cache(maxsize=64)
def _solve(parts: tuple[tuple[int, float, float, float], ...]) -> tuple[FillEstimate, ...]:
    """Solve the renewal equation; cached, since cards that the same demands accept have the same solution."""
    sizes = [
        _merge_sizes(milli, [part for part in parts if part[0] == milli])
        for milli in sorted({part[0] for part in parts})
    ]
    solved = [FillEstimate()]
    squares = [(0.0, 0.0)]
    for free in range(1, WHOLE + 1):
        estimate, square = _step(free, [size for size in sizes if size.milli <= free], solved, squares)
        solved.append(estimate)
        squares.append(square)
    return tuple(solved)


def _merge_sizes(milli: int, parts: list[tuple[int, float, float, float]]) -> _DemandSize:
    chance = sum(part[1] for part in parts)
    return _DemandSize(
        milli=milli,
        chance=chance,
        cpu=sum(part[1] * part[2] for part in parts) / chance,
        cpu_square=sum(part[1] * part[2] ** 2 for part in parts) / chance,
        memory=sum(part[1] * part[3] for part in parts) / chance,
        memory_square=sum(part[1] * part[3] ** 2 for part in parts) / chance,
    )


def _step(
    free: int, sizes: list[_DemandSize], solved: list[FillEstimate], squares: list[tuple[float, float]]
) -> tuple[FillEstimate, tuple[float, float]]:
    """Return the estimate for `free` from those for less, with the mean squares of CPU and memory."""
    if not sizes:
        return FillEstimate(waste=float(free)), (0.0, 0.0)
    total = _GIVE_UP_CHANCE + sum(size.chance for size in sizes)
    waste = _GIVE_UP_CHANCE * free
    cpu = cpu_square = memory = memory_square = 0.0
    for size in sizes:
        rest, square = solved[free - size.milli], squares[free - size.milli]
        waste += size.chance * rest.waste
        cpu += size.chance * (size.cpu + rest.cpu)
        cpu_square += size.chance * (size.cpu_square + 2 * size.cpu * rest.cpu + square[0])
        memory += size.chance * (size.memory + rest.memory)
        memory_square += size.chance * (size.memory_square + 2 * size.memory * rest.memory + square[1])
    waste, cpu, cpu_square = waste / total, cpu / total, cpu_square / total
    memory, memory_square = memory / total, memory_square / total
    estimate = FillEstimate(
        waste=waste,
        used=free - waste,
        cpu=cpu,
        cpu_variance=max(0.0, cpu_square - cpu * cpu),
        memory=memory,
        memory_variance=max(0.0, memory_square - memory * memory),
    )
    return estimate, (cpu_square, memory_square)


def estimate_contention(workload: Workload, supply: Supply) -> dict[GpuSpec, float]:
    """Return how many of the requested GPUs compete for a GPU of each card, relative to the mean over all GPUs.

    Each demand counts in equal parts on all GPUs that it accepts. A model of which there are few is contended if
    demands name it, even if they are not many; demands that accept any card count the same everywhere.
    """
    requested = sum(demand.gpus * demand.milli * frequency for demand, frequency in workload)
    contention = dict.fromkeys(supply, 0.0)
    for demand, frequency in workload:
        accepted = [card for card in supply if demand.cards is None or card in demand.cards]
        there = sum(supply[card] for card in accepted)
        for card in accepted if there else ():
            part = demand.gpus * demand.milli * frequency / requested
            contention[card] += part * sum(supply.values()) / there
    return contention


@dataclass(frozen=True, slots=True)
class MultiGpuDemand:
    """A kind of demand for several GPUs of one node."""

    demand: NodeDemand
    #: Its part of all requested GPUs.
    part: float


def find_multi_gpu_demands(workload: Workload) -> tuple[MultiGpuDemand, ...]:
    """Return the workload's demands for several GPUs."""
    requested = sum(demand.gpus * frequency for demand, frequency in workload)
    return tuple(
        MultiGpuDemand(demand, demand.gpus * frequency / requested) for demand, frequency in workload if demand.gpus > 1
    )


def estimate_gang_waste(
    multi_gpu_demands: Sequence[MultiGpuDemand], whole: Sequence[GpuSpec], cpu_milli: int, memory_mib: int
) -> float:
    """Return the thousandths of a node's `whole` free GPUs that count as wasted, since multi-GPU demands cannot use
    them.
    """
    missed = 0.0
    for multi_gpu_demand in multi_gpu_demands:
        demand = multi_gpu_demand.demand
        usable = len(whole) if demand.cards is None else sum(card in demand.cards for card in whole)
        times = min(
            usable // demand.gpus,
            cpu_milli // demand.cpu_milli if demand.cpu_milli else usable,
            memory_mib // demand.memory_mib if demand.memory_mib else usable,
        )
        missed += multi_gpu_demand.part * (len(whole) - times * demand.gpus)
    return _GANG_WASTE_WEIGHT * WHOLE * missed


def _expected_shortage(need: float, variance: float, free: int) -> float:
    """Return the expected unmet part of a normally distributed need, from 0 to about 1."""
    if need <= 0.0 or free >= UNLIMITED:
        return 0.0
    shortfall = need - free
    deviation = math.sqrt(max(0.0, variance))
    if shortfall <= -_MAX_DEVIATIONS * deviation:
        return 0.0
    if shortfall >= _MAX_DEVIATIONS * deviation:
        return shortfall / need
    z = shortfall / deviation
    density = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return (0.5 * shortfall * math.erfc(-z / math.sqrt(2.0)) + deviation * density) / need
