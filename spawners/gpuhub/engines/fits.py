"""Which nodes one kind of demand fits on now, and which of them suits it best: kept up to date from the stock's log."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple

from gpuhub.engines.bans import Ban
from gpuhub.engines.kinds import Kind
from gpuhub.engines.placement import WHOLE, Choice, Demand, Policy
from gpuhub.engines.stock import Node, State, Stock, View

#: Remembered answers are thrown away beyond so many states.
_MOST_ANSWERS = 8192


class Option(NamedTuple):
    """A node on which the demand fits, as it may be seen."""

    node: Node
    view: View
    #: GPUs that could be had there.
    room: int


class Bans:
    """What some requests may not use, node by node, and what remains there."""

    def __init__(self, stock: Stock, by_node: Mapping[str, Ban]) -> None:
        self.by_node = by_node
        self._stock = stock
        self._views: dict[str, tuple[View | None, View | None]] = {}

    def view(self, name: str) -> View | None:
        """What may be used of a node; None when nothing."""
        node = self._stock.nodes[name]
        now = self._stock.view(node)
        known = self._views.get(name)
        if known is None or known[0] is not now:
            known = self._views[name] = now, self._stock.masked(node, self.by_node[name])
        return known[1]


class Fits:
    """The nodes that a kind fits on."""

    def __init__(self, kind: Kind, stock: Stock, policy: Policy) -> None:
        self.kind = kind
        self._stock = stock
        self._policy = policy
        self._begin()

    def _begin(self) -> None:
        self._epoch, self._moment = self._stock.epoch, -1
        self.accepted = frozenset(no for card, no in self._stock.cards.items() if self.kind.accepts(card))
        self.liked = self.kind.liked(self._stock.cards)
        self.liked_numbers = [self._stock.cards[card] for card in self.liked]
        self._rooms: dict[State, int] = {}
        self._views: dict[str, View] = {}
        self._total = 0
        self._begin_choosing(self._policy)

    def _begin_choosing(self, policy: Policy) -> None:
        self._policy = policy
        self._choices: dict[tuple[State, int, int], Choice | None] = {}
        self._heap: list[tuple[tuple[float, ...], str]] = []
        self._ranked: dict[str, tuple[float, ...]] = {}
        self._unranked = dict.fromkeys(self._views)

    @property
    def is_mixed(self) -> bool:
        """Whether different cards can be met on one node."""
        return bool(self._stock.mixed_nodes)

    def use(self, policy: Policy) -> None:
        """Choose by another policy from now on."""
        if policy is not self._policy:
            self._begin_choosing(policy)

    def room(self, state: State) -> int:
        """GPUs (nodes for a demand without GPU) that could be had in this state, 0 when the demand does not fit."""
        room = self._rooms.get(state)
        if room is None:
            if len(self._rooms) > _MOST_ANSWERS:
                self._rooms.clear()
            room = self._rooms[state] = self._room(state)
        return room

    def count(self, bans: Bans | None) -> int:
        """Nodes, or GPUs for a spread demand, on which it fits."""
        self._catch_up()
        total = self._total
        for name in self._banned(bans):
            total -= self._worth(self._views[name])
            total += sum(option.room if self.kind.is_spread else 1 for option in self._remaining(bans, [name]))
        return total

    def best(self, bans: Bans | None) -> tuple[Option, Choice] | None:
        """The node that suits a demand for one node best."""
        self._catch_up()
        banned = self._banned(bans)
        aside = []
        found: tuple[tuple[float, ...], str] | None = None
        self._rank_all()
        while self._heap:
            rank, name = self._heap[0]
            if self._ranked.get(name) != rank:
                heapq.heappop(self._heap)
            elif name in banned:
                aside.append(heapq.heappop(self._heap))
            else:
                found = rank, name
                break
        for entry in aside:
            heapq.heappush(self._heap, entry)
        best = self._option(found[1], self._views[found[1]]) if found else None
        for option in self._remaining(bans, banned):
            choice = self.choose(option, self.kind.gpus)
            rated = (choice.rank, option.node.supply.name) if choice else None
            if rated is not None and (found is None or rated < found):
                found, best = rated, option
        choice = self.choose(best, self.kind.gpus) if best else None
        return (best, choice) if best and choice else None

    def options(self, bans: Bans | None) -> list[Option]:
        """All nodes on which it fits, by name."""
        self._catch_up()
        banned = self._banned(bans)
        free = [self._option(name, view) for name, view in self._views.items() if name not in banned]
        free += self._remaining(bans, banned)
        return sorted(free, key=lambda option: option.node.supply.name)

    def choose(self, option: Option, gpus: int, card: int = -1) -> Choice | None:
        """What the policy says of so many GPUs on a node, all of one card when one is named."""
        state = option.view[0]
        key = state, gpus, card
        if key not in self._choices:
            if len(self._choices) > _MOST_ANSWERS:
                self._choices.clear()
            self._choices[key] = self._choose(state, gpus, card)
        return self._choices[key]

    def demand(self, gpus: int) -> Demand:
        """What a policy is asked for."""
        return Demand(
            gpus=gpus,
            cards=None
            if len(self.liked) == len(self._stock.cards) and not self.kind.requirement.models
            else self.liked,
            milli=self.kind.milli,
            cpu_milli=self.kind.cpu_milli,
            memory_mib=self.kind.memory_mib,
            exclusive=self.kind.is_exclusive,
        )

    def _choose(self, state: State, gpus: int, card: int) -> Choice | None:
        if not gpus:
            return Choice(rank=(state.load,), gpus=())
        free = tuple(
            milli if card in (-1, no) and self._is_open(milli, parts) else 0
            for no, milli, parts in zip(state.cards, state.free, state.parts, strict=True)
        )
        return self._policy.choose(state.seen(free), self.demand(gpus))

    def _is_open(self, milli: int, parts: int) -> bool:
        if self.kind.joins:
            return parts == self.kind.share and milli > 0
        return milli == WHOLE or (self.kind.share == 1 and milli > 0)

    def _room(self, state: State) -> int:
        kind = self.kind
        if state.cpu_milli < kind.cpu_milli or state.memory_mib < kind.memory_mib or (kind.is_exclusive and state.load):
            return 0
        if not kind.gpus:
            return 1
        room = 0
        for no, milli, parts in zip(state.cards, state.free, state.parts, strict=True):
            if milli and no in self.accepted and (parts == kind.share if kind.joins else milli == WHOLE):
                room += 1
        return room if room >= kind.gpus else 0

    def _worth(self, view: View) -> int:
        room = self.room(view[0])
        return room if self.kind.is_spread else min(room, 1)

    def _banned(self, bans: Bans | None) -> list[str]:
        if bans is None:
            return []
        return [name for name in bans.by_node if name in self._views]

    def _remaining(self, bans: Bans | None, banned: list[str]) -> list[Option]:
        """The banned nodes on which it fits nevertheless; never for one that wants the node for itself."""
        views = [(name, bans.view(name)) for name in banned] if bans and not self.kind.is_exclusive else []
        return [self._option(name, view) for name, view in views if view is not None and self.room(view[0])]

    def _option(self, name: str, view: View) -> Option:
        return Option(node=self._stock.nodes[name], view=view, room=self.room(view[0]))

    def _catch_up(self) -> None:
        stock = self._stock
        if self._epoch != stock.epoch:
            self._begin()
        if self._moment == stock.moment:
            return
        names = stock.changed_since(self._moment)
        self._moment = stock.moment
        for name in names:
            node = stock.nodes[name]
            view = stock.view(node)
            before = self._views.pop(name, None)
            if before is not None:
                self._total -= self._worth(before)
                self._ranked.pop(name, None)
                self._unranked.pop(name, None)
            if view is not None and self.room(view[0]) and self.kind.accepts_node(node.supply):
                self._views[name] = view
                self._unranked[name] = None
                self._total += self._worth(view)

    def _rank_all(self) -> None:
        if len(self._heap) > 4 * len(self._views) + 64:
            self._heap = [(rank, name) for name, rank in self._ranked.items()]
            heapq.heapify(self._heap)
        for name in self._unranked:
            choice = self.choose(self._option(name, self._views[name]), self.kind.gpus)
            if choice is not None:
                self._ranked[name] = choice.rank
                heapq.heappush(self._heap, (choice.rank, name))
        self._unranked.clear()
