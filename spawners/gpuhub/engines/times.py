"""When a kind of demand will fit on each node, as far as time limits tell: kept up to date from the stock's log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from gpuhub.engines.kinds import Kind
from gpuhub.engines.stock import AT_ONCE, UNKNOWN, Node, Stock


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What is promised to others on a node, from now until then."""

    slots: frozenset[str]
    until: float
    is_whole: bool = False
    cpu_milli: int = 0
    memory_mib: int = 0


class Times:
    """When a kind fits where; nodes on which it will never fit, as things are, are left out."""

    def __init__(self, kind: Kind, stock: Stock) -> None:
        self.kind = kind
        self._stock = stock
        self._epoch, self._moment = -1, -1
        self._openings: dict[str, float] = {}
        self._lacking: dict[str, int] = {}

    def openings(self, claims: Mapping[str, Sequence[Claim]]) -> Mapping[str, float]:
        """From when on it fits, by node (with one GPU at least for a spread demand); `claims` of others come first."""
        self._catch_up()
        touched = [name for name in claims if name in self._openings]
        if not touched:
            return self._openings
        openings = dict(self._openings)
        for name in touched:
            at = self._opening(self._stock.nodes[name], claims[name])
            if at is None:
                del openings[name]
            else:
                openings[name] = at
        return openings

    def gpus(self, name: str, claims: Mapping[str, Sequence[Claim]]) -> list[tuple[float, int]]:
        """When each GPU that will do is free on a node, soonest first, with its position."""
        return self._gpus(self._stock.nodes[name], claims.get(name, ()))

    def lacking(self, name: str, claims: Mapping[str, Sequence[Claim]]) -> int:
        """How many of the GPUs needed on a node are free at no known time."""
        lacking = None if name in claims else self._lacking.get(name)
        if lacking is None:
            lacking = sum(end == UNKNOWN for end, _ in self.gpus(name, claims)[: self.kind.gpus])
            if name not in claims:
                self._lacking[name] = lacking
        return lacking

    def everywhere(self) -> list[str]:
        """The nodes on which it fits at some time."""
        self._catch_up()
        return list(self._openings)

    def at_without(self, node: Node, holdings: Set[str], claims: Sequence[Claim]) -> float | None:
        """From when on it fits on a node, if these holdings ended at once; None for never."""
        uses = {name: replace(use, ends_at=AT_ONCE) if name in holdings else use for name, use in node.uses.items()}
        return self._opening(replace(node, uses=uses, is_fresh=False), claims)

    def _catch_up(self) -> None:
        stock = self._stock
        if self._epoch != stock.epoch:
            self._epoch, self._moment = stock.epoch, -1
            self._accepted = frozenset(no for card, no in stock.cards.items() if self.kind.accepts(card))
            self._openings.clear()
            self._lacking.clear()
        if self._moment == stock.moment:
            return
        names: Iterable[str] = stock.changed_since(self._moment)
        self._moment = stock.moment
        for name in names:
            node = stock.nodes[name]
            self._lacking.pop(name, None)
            at = self._opening(node, ()) if self.kind.accepts_node(node.supply) else None
            if at is None:
                self._openings.pop(name, None)
            else:
                self._openings[name] = at

    def _opening(self, node: Node, claims: Sequence[Claim]) -> float | None:
        if not node.supply.takes_work:
            return None
        kind = self.kind
        self._stock.view(node)
        gpus = self._gpus(node, claims) if kind.gpus else []
        if len(gpus) < kind.gpus:
            return None
        ats: list[float | None] = [gpus[kind.gpus - 1][0] if kind.gpus else AT_ONCE]
        ats += [use.ends_at for use in node.uses.values() if kind.is_exclusive or use.is_exclusive]
        ats += [claim.until for claim in claims if kind.is_exclusive or claim.is_whole]
        supply = node.supply
        if kind.cpu_milli and supply.cpu_milli is not None:
            ats.append(_enough_at(kind.cpu_milli, supply.cpu_milli, used_cpu(node, claims)))
        if kind.memory_mib and supply.memory_mib is not None:
            ats.append(_enough_at(kind.memory_mib, supply.memory_mib, used_memory(node, claims)))
        known = [at for at in ats if at is not None]
        return max(known) if len(known) == len(ats) else None

    def _gpus(self, node: Node, claims: Sequence[Claim]) -> list[tuple[float, int]]:
        found = []
        accepted, share = self._accepted, self.kind.share
        for place, (end, card) in enumerate(zip(node.ends, node.cards, strict=True)):
            if end is not None and card in accepted:
                found.append((end, place))
        if share > 1:
            parts = node.part_ends
            found = [
                (parts[place][1] if place in parts and parts[place][0] == share else end, place) for end, place in found
            ]
        for claim in claims:
            slots = node.supply.slots
            found = [
                (max(end, claim.until) if slots[place].uuid in claim.slots else end, place) for end, place in found
            ]
        found.sort()
        return found


def used_cpu(node: Node, claims: Sequence[Claim]) -> list[tuple[float, int]]:
    """Until when how much of a node's CPU is used or promised."""
    used = [(use.ends_at, use.cpu_milli) for use in node.uses.values()]
    return used + [(claim.until, claim.cpu_milli) for claim in claims]


def used_memory(node: Node, claims: Sequence[Claim]) -> list[tuple[float, int]]:
    """Until when how much of a node's memory is used or promised."""
    used = [(use.ends_at, use.memory_mib) for use in node.uses.values()]
    return used + [(claim.until, claim.memory_mib) for claim in claims]


def _enough_at(needed: int, there: int, used: Iterable[tuple[float, int]]) -> float | None:
    """When so much is there to use; None for never."""
    ending = sorted(used)
    free = there - sum(amount for _, amount in ending)
    if free >= needed:
        return AT_ONCE
    for end, amount in ending:
        free += amount
        if free >= needed:
            return end
    return None
