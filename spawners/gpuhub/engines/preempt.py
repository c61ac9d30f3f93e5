"""Which holdings give GPUs back so that a request fits: few, of little value, and the youngest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuhub.engines.backfill import make_plan
from gpuhub.engines.base import Holding, Preemption, Request
from gpuhub.engines.stock import Node, Stock
from gpuhub.engines.times import Claim, Times


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What may be taken back at once: a scavenging holding as a whole, or one node of an elastic one."""

    holding: Holding
    nodes: frozenset[str]
    is_whole: bool

    @property
    def cost(self) -> tuple[int, float, str]:
        """GPUs lost, then work lost."""
        gpus = sum(len(share.slots) for share in self.holding.shares if share.node in self.nodes)
        return gpus, -self.holding.granted_at, self.holding.request.id


Claims = Mapping[str, Sequence[Claim]]


def choose(request: Request, ways: Sequence[Times], claims: Claims, stock: Stock, now: float) -> list[Preemption]:
    """The preemptions that make the request fit; empty when none do. What was granted at this moment stays."""
    units = [unit for holding in stock.holdings.values() if holding.granted_at < now for unit in _units(holding)]
    if not units:
        return []
    found = [Search(request=request, times=times, claims=claims, stock=stock, now=now).find(units) for times in ways]
    enough = [chosen for chosen in found if chosen]
    if not enough:
        return []
    best = min(enough, key=lambda chosen: (len(chosen), sorted(unit.cost for unit in chosen)))
    return _preemptions(best, request)


def _units(holding: Holding) -> Iterator[Unit]:
    """What a holding may be asked for; nothing of one that ends already, or that is stuck."""
    request = holding.request
    nodes = frozenset(share.node for share in holding.shares)
    if holding.is_ending or holding.is_quarantined:
        return
    if request.scavenge:
        yield Unit(holding=holding, nodes=nodes, is_whole=True)
    elif _surplus(holding) > 0:
        for node in sorted(nodes - holding.giving_up - {holding.leader}):
            yield Unit(holding=holding, nodes=frozenset({node}), is_whole=False)


def _surplus(holding: Holding) -> int:
    """Nodes that an elastic holding can do without."""
    if holding.request.spread is not None:
        return 0
    return len({share.node for share in holding.shares} - holding.giving_up) - holding.request.least_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The search for what one way to serve a request needs."""

    request: Request
    times: Times
    claims: Claims
    stock: Stock
    now: float

    def find(self, units: Sequence[Unit]) -> list[Unit]:
        """The units to take back; empty when that does not do."""
        chosen = self._spread(units) if self.request.spread is not None else self._shaped(units)
        return self._pruned(chosen) if chosen and self._fits(chosen) else []

    def _spread(self, units: Sequence[Unit]) -> list[Unit]:
        """One by one, those with most GPUs first, until it fits."""
        chosen: list[Unit] = []
        for unit in sorted(units, key=lambda unit: (-self._useful(unit), unit.cost)):
            if self._useful(unit) and _allowed([*chosen, unit]):
                chosen.append(unit)
                if self._fits(chosen):
                    break
        return chosen

    def _shaped(self, units: Sequence[Unit]) -> list[Unit]:
        """What the cheapest nodes need."""
        by_node: dict[str, list[Unit]] = {}
        for unit in units:
            for node in unit.nodes:
                by_node.setdefault(node, []).append(unit)
        priced = []
        for name in self.times.everywhere():
            wanted = self._for_node(self.stock.nodes[name], by_node.get(name, []))
            if wanted is not None:
                priced.append((len(wanted), sorted(unit.cost for unit in wanted), name, wanted))
        chosen: list[Unit] = []
        missing = self.request.least_nodes
        for _, _, _, wanted in sorted(priced, key=lambda each: each[:3]):
            more = [*chosen, *(unit for unit in wanted if unit not in chosen)]
            if missing and _allowed(more):
                chosen, missing = more, missing - 1
        return chosen

    def _useful(self, unit: Unit) -> int:
        """GPUs of it that will do."""
        kind, nodes = self.times.kind, self.stock.nodes
        return sum(
            kind.accepts(slot.card)
            for share in unit.holding.shares
            if share.node in unit.nodes and share.node in nodes and kind.accepts_node(nodes[share.node].supply)
            for slot in share.slots
        )

    def _for_node(self, node: Node, units: Sequence[Unit]) -> list[Unit] | None:
        """The units to take back so that a node will do; None when it will not do even so."""
        ordered = sorted(units, key=lambda unit: (-_on_node(unit, node), unit.cost))
        chosen: list[Unit] = []
        while not self._node_fits(node, chosen):
            if len(chosen) == len(ordered):
                return None
            chosen.append(ordered[len(chosen)])
        for unit in reversed(list(chosen)):
            fewer = [each for each in chosen if each is not unit]
            if self._node_fits(node, fewer):
                chosen = fewer
        return chosen

    def _node_fits(self, node: Node, freed: Iterable[Unit]) -> bool:
        ended = {unit.holding.request.id for unit in freed}
        at = self.times.at_without(node, ended, self.claims.get(node.supply.name, ()))
        return at is not None and at <= self.now

    def _fits(self, freed: Iterable[Unit]) -> bool:
        """Whether the request fits once these are given back."""
        before: dict[str, Holding] = {}
        for unit in freed:
            before.setdefault(unit.holding.request.id, unit.holding)
            self.stock.give_up(unit.holding.request.id, unit.nodes)
        plan = make_plan(self.request, [self.times], self.claims, self.stock)
        for holding in before.values():
            self.stock.hold(holding)
        return plan is not None and plan.at <= self.now

    def _pruned(self, chosen: list[Unit]) -> list[Unit]:
        """Without those that are not needed, dear ones first."""
        for unit in sorted(chosen, key=lambda unit: unit.cost, reverse=True):
            fewer = [each for each in chosen if each is not unit]
            if self._fits(fewer):
                chosen = fewer
        return chosen


def _on_node(unit: Unit, node: Node) -> int:
    return sum(len(share.slots) for share in unit.holding.shares if share.node == node.supply.name)


def _allowed(units: Iterable[Unit]) -> bool:
    """Whether every elastic holding keeps its least number of nodes."""
    taken: dict[str, int] = {}
    for unit in units:
        name = unit.holding.request.id
        taken[name] = taken.get(name, 0) + 1
        if not unit.is_whole and taken[name] > _surplus(unit.holding):
            return False
    return True


def _preemptions(chosen: Iterable[Unit], request: Request) -> list[Preemption]:
    by_holding: dict[str, Preemption] = {}
    for unit in chosen:
        name = unit.holding.request.id
        known = by_holding.get(name)
        by_holding[name] = (
            replace(known, nodes=known.nodes | unit.nodes)
            if known
            else Preemption(holding=name, nodes=unit.nodes, is_whole=unit.is_whole, for_request=request.id)
        )
    return list(by_holding.values())
