"""Placement policies: which GPUs of which node a demand gets while several would do.

To add a policy, write a class with the `choose` method of `PlacementPolicy` and a factory for it, and add the factory
to `POLICIES`. `BaseScheduler` takes the factory as its argument `policy_factory`; the default is `DEFAULT_POLICY`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

from gpuhub.common.gpu import GpuSpec
from gpuhub.scheduler import fragmentation
from gpuhub.scheduler.demand import UNLIMITED, WHOLE, NodeDemand
from gpuhub.scheduler.fragmentation import FillEstimate, Supply, Workload

#: Part of a GPU that counts as lost where a contended card is used, for each multiple of the mean contention. Chosen on
#: OpenB with a third of the tasks limited to two random models: with less, flexible tasks take the scarce models; with
#: more, they crowd into the others and leave more parts of GPUs there.
_CONTENTION_WEIGHT = 0.5
#: Cached choices of one policy, about 500 bytes each.
_CACHE_SIZE = 16384
_NO_FREE_GPU = FillEstimate()


@dataclass(frozen=True, slots=True)
class FreeCapacity:
    """Free resources of one node. Nodes with equal values are interchangeable, so policies may cache by value."""

    #: The card of each GPU, in a fixed order.
    cards: tuple[GpuSpec, ...]
    #: Thousandths of each GPU that can be granted; 0 for a GPU that is held, failed or masked.
    free: tuple[int, ...]
    #: Free CPU in thousandths of a core, and free memory in MiB; `UNLIMITED` where the settings give no number.
    cpu_milli: int = UNLIMITED
    memory_mib: int = UNLIMITED
    #: Number of notebook and worker containers on the node.
    load: int = 0


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """GPUs of one node for a demand, with a rank: the node with the smallest rank gets the demand."""

    rank: tuple[float, ...]
    #: Positions in `FreeCapacity.free`.
    gpus: tuple[int, ...]


class PlacementPolicy(Protocol):
    """Chooses GPUs within a node and ranks the node; depends on nothing but its arguments and its workload."""

    def choose(self, node: FreeCapacity, demand: NodeDemand) -> PlacementChoice | None:
        """Return the best choice on this node; None if the demand does not fit there now."""
        ...


#: Builds a policy for a typical workload, which is pairs of a demand and its frequency, on any positive scale, and for
#: the number of GPUs of each card.
PolicyFactory = Callable[[Workload, Supply], PlacementPolicy]


def make_least_waste(workload: Workload, supply: Supply) -> PlacementPolicy:
    """Return the policy for a workload; a workload without GPUs counts as demands for one whole GPU each."""
    has_gpus = any(demand.gpus for demand, _ in workload)
    return LeastWastePolicy(workload if has_gpus else fragmentation.DEFAULT_WORKLOAD, supply)


class LeastWastePolicy:
    """Places a demand where it adds least to the GPUs that will stay unused.

    Places with acceptable cards are compared by, in this order:

    1. The card: the one that the user prefers. Without a preference a demand gets the least capable card that it
       accepts, so that the large cards stay free for demands that need them.
    2. The added waste and the contention of the card (`fragmentation.py`). The waste is that of the node's GPUs
       afterwards minus that of before. This is the idea of Fragmentation Gradient Descent (Weng et al., "Beware of
       Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent", USENIX ATC 2023) with
       another measure. FGD counts as fragmented what the next typical task cannot use: a node with 4 free GPUs and CPU
       for 2 more tasks looks whole to it, since any one task fits, and 350 free thousandths look as bad as 300 where
       every second task wants a whole GPU, though 320 is a popular share. Here the node is filled to the end by the
       model. So CPU and memory are balanced with the GPUs from the first task on, tasks that need much CPU go where
       there is plenty, and a share goes where the rest is a popular share too. Where demands for several GPUs are
       usual, nodes with many whole GPUs are kept for them. Contention keeps scarce cards for the demands that accept no
       others: a demand that could go elsewhere counts as a loss where many demands share few GPUs.
    3. Best fit: the share that leaves least of its GPU, then the fuller node, so that whole nodes stay free for gangs.
    4. The node with fewer containers. For demands without GPU, which spread, this comes before the fuller node.

    Without a known workload all demands count as demands for one whole GPU, and best fit remains. A choice depends on
    one node's free capacity, the workload and the number of GPUs of each card alone, so choices are cached by value.
    """

    def __init__(self, workload: Workload, supply: Supply) -> None:
        self._workload = workload
        self._contention = fragmentation.estimate_contention(workload, supply)
        self._multi_gpu_demands = fragmentation.find_multi_gpu_demands(workload)
        self._estimates: dict[GpuSpec, tuple[FillEstimate, ...]] = {}
        self._cached_choose = lru_cache(maxsize=_CACHE_SIZE)(self._choose)

    def choose(self, node: FreeCapacity, demand: NodeDemand) -> PlacementChoice | None:
        return self._cached_choose(node, demand)

    def _choose(self, node: FreeCapacity, demand: NodeDemand) -> PlacementChoice | None:
        if not _has_room(node, demand):
            return None
        if demand.gpus == 0:
            return self._choose_without_gpu(node, demand)
        if demand.milli < WHOLE:
            return self._choose_share(node, demand)
        return self._choose_whole(node, demand)

    def _choose_without_gpu(self, node: FreeCapacity, demand: NodeDemand) -> PlacementChoice:
        estimate = self._sum_estimates(node)
        added = self._added_waste(node, demand, (estimate, estimate), ())
        return PlacementChoice(rank=(added, node.load, sum(node.free)), gpus=())

    def _choose_share(self, node: FreeCapacity, demand: NodeDemand) -> PlacementChoice | None:
        """Return the best choice for a part of one GPU, over all free parts that differ."""
        before = self._sum_estimates(node)
        tried: set[tuple[GpuSpec, int]] = set()
        best: PlacementChoice | None = None
        for position, (card, free) in enumerate(zip(node.cards, node.free, strict=True)):
            if free < demand.milli or (card, free) in tried or not _accepts(demand, card):
                continue
            tried.add((card, free))
            left = free - demand.milli
            of_card = self._estimates_of(card)
            after = before - of_card[free] + of_card[left]
            rank = self._build_rank(
                node, demand, (position,), self._added_waste(node, demand, (before, after), (position,)), left
            )
            if best is None or rank < best.rank:
                best = PlacementChoice(rank=rank, gpus=(position,))
        return best

    def _choose_whole(self, node: FreeCapacity, demand: NodeDemand) -> PlacementChoice | None:
        """Return whole GPUs: the preferred or least capable cards, and of these those that fewest demands can use."""
        usable = [
            position
            for position, (card, free) in enumerate(zip(node.cards, node.free, strict=True))
            if free == WHOLE and _accepts(demand, card)
        ]
        if len(usable) < demand.gpus:
            return None
        usable.sort(
            key=lambda position: (
                _card_preference(demand, node.cards[position]),
                self._contention.get(node.cards[position], 0.0),
                -self._estimates_of(node.cards[position])[WHOLE].waste,
            )
        )
        gpus = tuple(sorted(usable[: demand.gpus]))
        after = before = self._sum_estimates(node)
        for position in gpus:
            after -= self._estimates_of(node.cards[position])[WHOLE]
        return PlacementChoice(
            rank=self._build_rank(node, demand, gpus, self._added_waste(node, demand, (before, after), gpus), 0),
            gpus=gpus,
        )

    def _build_rank(
        self, node: FreeCapacity, demand: NodeDemand, gpus: tuple[int, ...], added: int, left: int
    ) -> tuple[float, ...]:
        preferences = [_card_preference(demand, node.cards[position]) for position in gpus]
        contention = sum(self._contention.get(node.cards[position], 0.0) for position in gpus)
        lost = added + round(_CONTENTION_WEIGHT * demand.milli * contention)
        return sum(d[0] for d in preferences), sum(d[1] for d in preferences), lost, left, sum(node.free), node.load

    def _added_waste(
        self,
        node: FreeCapacity,
        demand: NodeDemand,
        estimates: tuple[FillEstimate, FillEstimate],
        gpus: tuple[int, ...],
    ) -> int:
        """Return the thousandths of a GPU that the demand on these GPUs adds to the unused part.

        `estimates` are the sums over the node's GPUs before and after. The result is rounded to whole thousandths, so
        that rounding errors decide nothing.
        """
        before, after = estimates
        whole = [position for position, free in enumerate(node.free) if free == WHOLE]
        now = before.waste + self._joint_waste(node, before, whole, node.cpu_milli, node.memory_mib)
        if demand.exclusive:
            return round(after.waste + after.used - now)
        cpu_milli, memory_mib = node.cpu_milli - demand.cpu_milli, node.memory_mib - demand.memory_mib
        left = [position for position in whole if position not in gpus]
        return round(after.waste + self._joint_waste(node, after, left, cpu_milli, memory_mib) - now)

    def _joint_waste(
        self, node: FreeCapacity, estimate: FillEstimate, whole: list[int], cpu_milli: int, memory_mib: int
    ) -> float:
        """Return the waste of the node's GPUs together, beyond the sum of each alone."""
        stranded = fragmentation.estimate_stranded(estimate, cpu_milli, memory_mib)
        if not self._multi_gpu_demands:
            return stranded
        return stranded + fragmentation.estimate_gang_waste(
            self._multi_gpu_demands, [node.cards[position] for position in whole], cpu_milli, memory_mib
        )

    def _sum_estimates(self, node: FreeCapacity) -> FillEstimate:
        return sum(
            (self._estimates_of(card)[free] for card, free in zip(node.cards, node.free, strict=True)), _NO_FREE_GPU
        )

    def _estimates_of(self, card: GpuSpec) -> tuple[FillEstimate, ...]:
        estimates = self._estimates.get(card)
        if estimates is None:
            estimates = self._estimates[card] = fragmentation.estimate_fills(self._workload, card)
        return estimates


def _has_room(node: FreeCapacity, demand: NodeDemand) -> bool:
    if node.cpu_milli < demand.cpu_milli or node.memory_mib < demand.memory_mib:
        return False
    return not (demand.exclusive and (node.load or _is_shared(node.free)))


def _is_shared(free: Iterable[int]) -> bool:
    return any(0 < milli < WHOLE for milli in free)


def _accepts(demand: NodeDemand, card: GpuSpec) -> bool:
    return demand.cards is None or card in demand.cards


def _card_preference(demand: NodeDemand, card: GpuSpec) -> tuple[int, int]:
    """Return the card's rank, smallest first: the demand's own preference, else GiB of memory and compute capability.

    Memory is rounded to GiB, since two models with the same memory report slightly different MiB.
    """
    if demand.cards is not None and demand.has_preference:
        return demand.cards.index(card), 0
    major, minor = card.capability or (0, 0)
    return round(card.memory_mib / 1024), 100 * major + minor


#: Every policy by name.
POLICIES: Final[Mapping[str, PolicyFactory]] = {"least-waste": make_least_waste}
DEFAULT_POLICY: Final = POLICIES["least-waste"]
