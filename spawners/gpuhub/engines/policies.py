"""The product's placement policy: put a demand where the least is wasted in the end. Pure.

Of all places with cards that will do, in this order:

1. The card. The best liked of `Demand.cards`; for a demand that takes any card, the least capable one, so that the big
   cards stay for those who need them.
2. The waste (`waste.py`). The place where the demand adds least to what will stay unused of the node's GPUs: the waste
   expected of the node afterwards less that of before. That is the idea of Fragmentation Gradient Descent (Weng et al.,
   "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent", USENIX ATC 2023)
   with another measure. FGD counts as fragmented what the next typical task cannot use. A node with 4 free GPUs and
   CPU for 2 more tasks looks whole to it, since any one task fits; and 350 free thousandths look as bad as 300 to it
   where every second task wants a whole GPU, though 320 is a popular share. Here the node is filled in thought, to the
   end: so CPU and memory are kept in balance with the GPUs from the first task on, tasks that need much CPU go where
   there is plenty, and a share goes where what it leaves over is a popular share too. Where demands for several GPUs
   are usual, nodes with many whole GPUs are kept for them.
3. Best fit: the share that leaves least of its GPU, then the fuller node, so that whole nodes stay free for gangs.
4. The node with fewer containers. This decides before the fuller node for demands without GPU, which spread.

Without a known workload all demands are taken to be for one whole GPU, and best fit remains. Everything is decided by
one node's state and the workload: answers are the same for nodes in equal states, and are remembered.
What it cannot see is how many of each card there are: a scarce model that demands name beside an abundant one is not
kept for them, unless it is the more capable one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from gpuhub.engines import waste
from gpuhub.engines.placement import WHOLE, Choice, Demand, NodeState, Policy
from gpuhub.engines.waste import Filling, Workload
from gpuhub.gpus import Card

#: Answers that are remembered; some 500 bytes each.
_REMEMBERED = 16384

_FULL = Filling()


def make_policy(workload: Workload) -> Policy:
    """The policy for a typical workload; without one, or one without GPUs, for whole GPUs."""
    return LeastWaste(workload if any(demand.gpus for demand, _ in workload) else waste.UNKNOWN)


class LeastWaste:
    """See above. A `Policy`."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._gangs = waste.gangs(workload)
        self._fillings: dict[Card, tuple[Filling, ...]] = {}
        self._remembered = lru_cache(maxsize=_REMEMBERED)(self._choose)

    def choose(self, node: NodeState, demand: Demand) -> Choice | None:
        """The best choice on this node; None when the demand does not fit there now."""
        return self._remembered(node, demand)

    def _choose(self, node: NodeState, demand: Demand) -> Choice | None:
        if not _has_room(node, demand):
            return None
        if demand.gpus == 0:
            return self._without_gpu(node, demand)
        if demand.milli < WHOLE:
            return self._share(node, demand)
        return self._whole(node, demand)

    def _without_gpu(self, node: NodeState, demand: Demand) -> Choice:
        filling = self._filling(node)
        added = self._added(node, demand, (filling, filling), ())
        return Choice(rank=(added, node.load, sum(node.free)), gpus=())

    def _share(self, node: NodeState, demand: Demand) -> Choice | None:
        """A part of one GPU: every free part that differs is tried."""
        before = self._filling(node)
        tried: set[tuple[Card, int]] = set()
        best: Choice | None = None
        for at, (card, free) in enumerate(zip(node.cards, node.free, strict=True)):
            if free < demand.milli or (card, free) in tried or not _accepts(demand, card):
                continue
            tried.add((card, free))
            left = free - demand.milli
            of_card = self._of_card(card)
            after = before - of_card[free] + of_card[left]
            rank = self._rank(node, demand, (at,), self._added(node, demand, (before, after), (at,)), left)
            if best is None or rank < best.rank:
                best = Choice(rank=rank, gpus=(at,))
        return best

    def _whole(self, node: NodeState, demand: Demand) -> Choice | None:
        """Whole GPUs: the least capable or best liked ones, and of these the ones that few others could use."""
        usable = [
            at
            for at, (card, free) in enumerate(zip(node.cards, node.free, strict=True))
            if free == WHOLE and _accepts(demand, card)
        ]
        if len(usable) < demand.gpus:
            return None
        usable.sort(key=lambda at: (_dearness(demand, node.cards[at]), -self._of_card(node.cards[at])[WHOLE].waste))
        gpus = tuple(sorted(usable[: demand.gpus]))
        after = before = self._filling(node)
        for at in gpus:
            after -= self._of_card(node.cards[at])[WHOLE]
        return Choice(
            rank=self._rank(node, demand, gpus, self._added(node, demand, (before, after), gpus), 0), gpus=gpus
        )

    def _rank(self, node: NodeState, demand: Demand, gpus: tuple[int, ...], added: int, left: int) -> tuple[float, ...]:
        dear = [_dearness(demand, node.cards[at]) for at in gpus]
        return sum(d[0] for d in dear), sum(d[1] for d in dear), added, left, sum(node.free), node.load

    def _added(self, node: NodeState, demand: Demand, fillings: tuple[Filling, Filling], gpus: tuple[int, ...]) -> int:
        """Thousandths of a GPU that the demand on these GPUs adds to what stays unused.

        `fillings` sum up the node's GPUs before and after. Whole thousandths, so that noise decides nothing.
        """
        before, after = fillings
        whole = [at for at, free in enumerate(node.free) if free == WHOLE]
        now = before.waste + self._on_node(node, before, whole, node.cpu_milli, node.memory_mib)
        if demand.exclusive:
            return round(after.waste + after.used - now)
        cpu_milli, memory_mib = node.cpu_milli - demand.cpu_milli, node.memory_mib - demand.memory_mib
        left = [at for at in whole if at not in gpus]
        return round(after.waste + self._on_node(node, after, left, cpu_milli, memory_mib) - now)

    def _on_node(self, node: NodeState, filling: Filling, whole: list[int], cpu_milli: int, memory_mib: int) -> float:
        """What the node's GPUs waste together, beyond what each does by itself."""
        stranded = waste.stranded(filling, cpu_milli, memory_mib)
        if not self._gangs:
            return stranded
        return stranded + waste.broken(self._gangs, [node.cards[at] for at in whole], cpu_milli, memory_mib)

    def _filling(self, node: NodeState) -> Filling:
        return sum((self._of_card(card)[free] for card, free in zip(node.cards, node.free, strict=True)), _FULL)

    def _of_card(self, card: Card) -> tuple[Filling, ...]:
        found = self._fillings.get(card)
        if found is None:
            found = self._fillings[card] = waste.fillings(self._workload, card)
        return found


def _has_room(node: NodeState, demand: Demand) -> bool:
    if node.cpu_milli < demand.cpu_milli or node.memory_mib < demand.memory_mib:
        return False
    return not (demand.exclusive and (node.load or _is_shared(node.free)))


def _is_shared(free: Iterable[int]) -> bool:
    return any(0 < milli < WHOLE for milli in free)


def _accepts(demand: Demand, card: Card) -> bool:
    return demand.cards is None or card in demand.cards


def _dearness(demand: Demand, card: Card) -> tuple[int, int]:
    """How reluctantly the card is given: by the demand's own liking, or by GiB of memory and compute capability.

    Whole GiB, since two models with the same memory report some MiB more or less of it.
    """
    if demand.cards is not None:
        return demand.cards.index(card), 0
    major, minor = card.capability or (0, 0)
    return round(card.memory_mib / 1024), 100 * major + minor
