"""How much of a node's free GPUs stays unused in the end, as far as a typical workload tells. Pure.

The question is not what fits a node now, but what is left of it once nothing comes any more that fits. Three answers
are added, all in thousandths of a GPU:

* Each GPU by itself (`fillings`). Demands come at random, in the workload's proportions; one that fits the free part of
  a GPU takes its share, and the rest waits for the next. Which is a renewal equation over the 1,000 sizes of a free
  part, solved once per kind of card: 190 free thousandths are nearly worthless where the smallest popular share is 320,
  and 350 are worth much. The same pass gives mean and variance of the CPU and memory that come with what fills it.
* All GPUs of a node together (`stranded`). What fills them needs CPU and memory; where the node probably has not got
  enough, a like part of its GPUs stays unused. The need is taken as normally distributed, since it is a sum of many.
* What demands for several GPUs miss (`broken`). Small demands fill every gap sooner or later, so that to the first two
  a node in use looks as good as an empty one; but while they do, the large ones find no node. Each kind of large
  demand is put on the node's whole GPUs as often as it fits: what then remains of these counts, in part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gpuhub.engines.placement import UNCOUNTED, WHOLE, Demand
from gpuhub.gpus import Card

Workload = tuple[tuple[Demand, float], ...]

#: Whole GPUs without more: what is assumed of a workload that nobody knows.
UNKNOWN: Workload = ((Demand(gpus=1), 1.0),)
#: A free part waits for some hundred demands, then it is given up: the chance, at each, that none follows. Without it
#: the rarest share would make every gap look useful. On the OpenB trace anything from 0.005 to 0.02 does equally well.
_END = 0.01
#: How much of what demands for several GPUs miss counts as waste, since others may use it still.
_BROKEN = 0.3
#: Beyond so many standard deviations a shortage is not worth computing.
_CERTAIN = 6.0


@dataclass(frozen=True, slots=True)
class Filling:
    """What becomes of a free part of one GPU, on average; sums over a node's GPUs are meant to be taken."""

    #: What stays unused, and what gets used, in thousandths of the GPU.
    waste: float = 0.0
    used: float = 0.0
    #: CPU that comes with what fills it: mean in thousandths of a core, and variance.
    cpu: float = 0.0
    cpu_variance: float = 0.0
    #: Memory likewise, MiB.
    memory: float = 0.0
    memory_variance: float = 0.0

    def __add__(self, other: Filling) -> Filling:
        return Filling(
            self.waste + other.waste,
            self.used + other.used,
            self.cpu + other.cpu,
            self.cpu_variance + other.cpu_variance,
            self.memory + other.memory,
            self.memory_variance + other.memory_variance,
        )

    def __sub__(self, other: Filling) -> Filling:
        return Filling(
            self.waste - other.waste,
            self.used - other.used,
            self.cpu - other.cpu,
            self.cpu_variance - other.cpu_variance,
            self.memory - other.memory,
            self.memory_variance - other.memory_variance,
        )


@dataclass(frozen=True, slots=True)
class _Size:
    """All demands of a workload for one size of a share together."""

    milli: int
    #: How often it comes, of all demands for GPUs.
    chance: float
    #: What one of it needs for each GPU: mean, and mean of the square.
    cpu: float
    cpu_square: float
    memory: float
    memory_square: float


def stranded(filling: Filling, cpu_milli: int, memory_mib: int) -> float:
    """Thousandths of GPUs that stay unused for lack of CPU or memory, of a node's GPUs that `filling` sums up."""
    lacks = max(
        _lack(filling.cpu, filling.cpu_variance, cpu_milli),
        _lack(filling.memory, filling.memory_variance, memory_mib),
    )
    return lacks * filling.used


def fillings(workload: Workload, card: Card) -> tuple[Filling, ...]:
    """What becomes of 0 to `WHOLE` free thousandths of such a card."""
    asked = sum(demand.gpus * often for demand, often in workload)
    parts = tuple(
        (demand.milli, demand.gpus * often / asked, demand.cpu_milli / demand.gpus, demand.memory_mib / demand.gpus)
        for demand, often in workload
        if demand.gpus and (demand.cards is None or card in demand.cards)
    )
    return _solve(parts)


@lru_cache(maxsize=64)
def _solve(parts: tuple[tuple[int, float, float, float], ...]) -> tuple[Filling, ...]:
    """The renewal equation; kept, since cards that the same demands accept have the same answer."""
    sizes = [
        _size(milli, [part for part in parts if part[0] == milli]) for milli in sorted({part[0] for part in parts})
    ]
    solved = [Filling()]
    squares = [(0.0, 0.0)]
    for free in range(1, WHOLE + 1):
        filling, square = _step(free, [size for size in sizes if size.milli <= free], solved, squares)
        solved.append(filling)
        squares.append(square)
    return tuple(solved)


def _size(milli: int, parts: list[tuple[int, float, float, float]]) -> _Size:
    chance = sum(part[1] for part in parts)
    return _Size(
        milli=milli,
        chance=chance,
        cpu=sum(part[1] * part[2] for part in parts) / chance,
        cpu_square=sum(part[1] * part[2] ** 2 for part in parts) / chance,
        memory=sum(part[1] * part[3] for part in parts) / chance,
        memory_square=sum(part[1] * part[3] ** 2 for part in parts) / chance,
    )


def _step(
    free: int, sizes: list[_Size], solved: list[Filling], squares: list[tuple[float, float]]
) -> tuple[Filling, tuple[float, float]]:
    """What becomes of `free`, from what becomes of less; with the mean squares of CPU and memory."""
    if not sizes:
        return Filling(waste=float(free)), (0.0, 0.0)
    total = _END + sum(size.chance for size in sizes)
    waste = _END * free
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
    filling = Filling(
        waste=waste,
        used=free - waste,
        cpu=cpu,
        cpu_variance=max(0.0, cpu_square - cpu * cpu),
        memory=memory,
        memory_variance=max(0.0, memory_square - memory * memory),
    )
    return filling, (cpu_square, memory_square)


@dataclass(frozen=True, slots=True)
class Gang:
    """A kind of demand for several GPUs of one node."""

    demand: Demand
    #: Its part of all GPUs that are asked for.
    part: float


def gangs(workload: Workload) -> tuple[Gang, ...]:
    """The workload's demands for several GPUs."""
    asked = sum(demand.gpus * often for demand, often in workload)
    return tuple(Gang(demand, demand.gpus * often / asked) for demand, often in workload if demand.gpus > 1)


def broken(kinds: Sequence[Gang], whole: Sequence[Card], cpu_milli: int, memory_mib: int) -> float:
    """Thousandths of a node's `whole` free GPUs that count as wasted for what demands for several cannot use."""
    missed = 0.0
    for kind in kinds:
        demand = kind.demand
        usable = len(whole) if demand.cards is None else sum(card in demand.cards for card in whole)
        times = min(
            usable // demand.gpus,
            cpu_milli // demand.cpu_milli if demand.cpu_milli else usable,
            memory_mib // demand.memory_mib if demand.memory_mib else usable,
        )
        missed += kind.part * (len(whole) - times * demand.gpus)
    return _BROKEN * WHOLE * missed


def _lack(need: float, variance: float, free: int) -> float:
    """The part of a need that is expected to find nothing, when it is normally distributed: from 0 to about 1."""
    if need <= 0.0 or free >= UNCOUNTED:
        return 0.0
    short = need - free
    deviation = math.sqrt(max(0.0, variance))
    if short <= -_CERTAIN * deviation:
        return 0.0
    if short >= _CERTAIN * deviation:
        return short / need
    z = short / deviation
    density = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return (0.5 * short * math.erfc(-z / math.sqrt(2.0)) + deviation * density) / need
