"""What the nodes have and what is held there, kept up to date change by change, with a log of changed nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from gpuhub.engines.bans import Ban
from gpuhub.engines.base import Holding, NodeSupply, Slot
from gpuhub.engines.placement import UNCOUNTED, WHOLE, NodeState
from gpuhub.gpus import Card

#: When something is free: at once (or as soon as its holder has ended, being asked to), or nobody knows when.
AT_ONCE = -math.inf
UNKNOWN = math.inf
#: The log of changes and the table of states are begun anew beyond so many entries.
_MOST_CHANGES = 65536
_MOST_STATES = 65536


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """What is free on a node, equal GPUs sorted by what is free of them. One object for nodes in the same state."""

    #: Numbers of cards, thousandths free, and into how many parts each GPU is divided (0: not at all), by position.
    cards: tuple[int, ...]
    free: tuple[int, ...]
    parts: tuple[int, ...]
    cpu_milli: int
    memory_mib: int
    load: int
    kinds: tuple[Card, ...]

    def seen(self, free: tuple[int, ...]) -> NodeState:
        """As a policy sees it, with so much free of each GPU."""
        return NodeState(
            cards=self.kinds, free=free, cpu_milli=self.cpu_milli, memory_mib=self.memory_mib, load=self.load
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What one holding takes of one node."""

    positions: tuple[int, ...]
    share: int
    cpu_milli: int
    memory_mib: int
    is_exclusive: bool
    #: `AT_ONCE` when asked to end, `UNKNOWN` without a time limit.
    ends_at: float


#: A state, and the position in `Node.supply.slots` of each of the state's GPUs.
View = tuple[State, tuple[int, ...]]


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One node with what is held there."""

    supply: NodeSupply
    #: The number of each slot's card.
    cards: tuple[int, ...]
    uses: dict[str, Use] = field(default_factory=dict)
    #: When each GPU is free as a whole; None for one that is not available.
    ends: tuple[float | None, ...] = ()
    #: When each divided GPU has a part to give, by position; only GPUs that are divided.
    part_ends: dict[int, tuple[int, float]] = field(default_factory=dict)
    is_fresh: bool = False
    #: What is free; None when nothing may run there now.
    view: View | None = None
    positions: dict[str, int] = field(default_factory=dict)

    @property
    def is_alone(self) -> bool:
        """Whether a holding has the node for itself."""
        return any(use.is_exclusive for use in self.uses.values())

    def free_cpu_milli(self) -> int:
        """What is not promised of the CPU."""
        if self.supply.cpu_milli is None:
            return UNCOUNTED
        return max(0, self.supply.cpu_milli - sum(use.cpu_milli for use in self.uses.values()))

    def free_memory_mib(self) -> int:
        """What is not promised of the memory."""
        if self.supply.memory_mib is None:
            return UNCOUNTED
        return max(0, self.supply.memory_mib - sum(use.memory_mib for use in self.uses.values()))

    def picked(self, view_order: Sequence[int], gpus: Iterable[int]) -> tuple[Slot, ...]:
        """The slots that a policy chose by position in a state."""
        return tuple(self.supply.slots[place] for place in sorted(view_order[at] for at in gpus))


class Stock:
    """All nodes, all holdings, and which nodes changed since when."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.holdings: dict[str, Holding] = {}
        #: Numbered as they appear; two equal cards are one.
        self.cards: dict[Card, int] = {}
        #: Raised when everything remembered about states is void.
        self.epoch = 0
        #: Nodes with different cards.
        self.mixed_nodes: set[str] = set()
        self._forgotten = 0
        self._on_node: dict[str, dict[str, None]] = {}
        self._log: list[str] = []
        self._states: dict[tuple[object, ...], State] = {}

    @property
    def moment(self) -> int:
        """Grows with every change of a node."""
        return self._forgotten + len(self._log)

    def changed_since(self, moment: int) -> Iterable[str]:
        """The nodes that changed after that moment; all when that is long ago."""
        if moment < self._forgotten:
            return self.nodes
        return dict.fromkeys(self._log[moment - self._forgotten :])

    def put_node(self, supply: NodeSupply) -> None:
        """Add or replace a node; holdings that name it hold there again."""
        known = self.nodes.get(supply.name)
        if known is not None and known.supply == supply:
            return
        for slot in supply.slots:
            if slot.card not in self.cards:
                self.cards[slot.card] = len(self.cards)
                self.epoch += 1
        node = Node(supply=supply, cards=tuple(self.cards[slot.card] for slot in supply.slots))
        node.positions = {slot.uuid: place for place, slot in enumerate(supply.slots)}
        self.nodes[supply.name] = node
        if len(set(node.cards)) > 1:
            self.mixed_nodes.add(supply.name)
        else:
            self.mixed_nodes.discard(supply.name)
        for holding_id in self._on_node.get(supply.name, ()):
            self._attach(node, self.holdings[holding_id])
        self._changed(node)

    def hold(self, holding: Holding) -> None:
        """Add or replace a holding."""
        self.release(holding.request.id)
        self.holdings[holding.request.id] = holding
        for share in holding.shares:
            self._on_node.setdefault(share.node, {})[holding.request.id] = None
            node = self.nodes.get(share.node)
            if node is not None:
                self._attach(node, holding)
                self._changed(node)

    def release(self, holding_id: str) -> Holding | None:
        """Forget a holding; None when there is none."""
        holding = self.holdings.pop(holding_id, None)
        if holding is None:
            return None
        for name in {share.node for share in holding.shares}:
            self._on_node[name].pop(holding_id, None)
            node = self.nodes.get(name)
            if node is not None:
                node.uses.pop(holding_id, None)
                self._changed(node)
        return holding

    def give_up(self, holding_id: str, nodes: frozenset[str]) -> None:
        """A holding is asked to give up nodes: what it has there counts as free at once, once it is gone."""
        holding = self.holdings[holding_id]
        is_whole = nodes >= {share.node for share in holding.shares}
        self.hold(replace(holding, is_ending=holding.is_ending or is_whole, giving_up=holding.giving_up | nodes))

    def view(self, node: Node) -> View | None:
        """What is free on a node; None when nothing may run there now."""
        if not node.is_fresh:
            self._refresh(node)
        return node.view

    def masked(self, node: Node, ban: Ban) -> View | None:
        """What is free on a node for whom the ban is meant."""
        whole = self.view(node)
        if whole is None or ban.is_whole:
            return None
        state, order = whole
        slots = node.supply.slots
        free = [0 if slots[place].uuid in ban.slots else state.free[at] for at, place in enumerate(order)]
        cpu = state.cpu_milli if ban.cpu_milli is None else min(state.cpu_milli, ban.cpu_milli)
        memory = state.memory_mib if ban.memory_mib is None else min(state.memory_mib, ban.memory_mib)
        rows = [(state.cards[at], -free[at], state.parts[at], place) for at, place in enumerate(order)]
        return self._view(rows, max(0, cpu), max(0, memory), state.load)

    def _attach(self, node: Node, holding: Holding) -> None:
        name, request = node.supply.name, holding.request
        uuids = [slot.uuid for share in holding.shares if share.node == name for slot in share.slots]
        node.uses[request.id] = Use(
            positions=tuple(node.positions[uuid] for uuid in uuids if uuid in node.positions),
            share=request.share,
            cpu_milli=request.cpu_milli,
            memory_mib=request.memory_mib,
            is_exclusive=request.exclusive,
            ends_at=_end(holding, name),
        )

    def _changed(self, node: Node) -> None:
        node.is_fresh = False
        self._log.append(node.supply.name)
        if len(self._log) > _MOST_CHANGES:
            self._forgotten += _MOST_CHANGES // 2
            del self._log[: _MOST_CHANGES // 2]
        if len(self._states) > _MOST_STATES:
            self._states.clear()

    def _refresh(self, node: Node) -> None:
        node.is_fresh = True
        slots = node.supply.slots
        count, parts = [0] * len(slots), [0] * len(slots)
        ends: list[float | None] = [AT_ONCE if slot.available else None for slot in slots]
        first_ends: dict[int, float] = {}
        for use in node.uses.values():
            for at in use.positions:
                if not count[at]:
                    parts[at] = use.share if use.share > 1 else 0
                elif parts[at] != use.share:
                    parts[at] = 0
                count[at] += 1
                end = ends[at]
                if end is not None:
                    ends[at] = max(end, use.ends_at)
                    first_ends[at] = min(first_ends.get(at, UNKNOWN), use.ends_at)
        free = [_free(end, count[at], parts[at]) for at, end in enumerate(ends)]
        node.ends = tuple(ends)
        node.part_ends = {
            at: (parts[at], AT_ONCE if free[at] else first_ends[at])
            for at, end in enumerate(ends)
            if parts[at] and end is not None
        }
        if node.supply.takes_work and not node.is_alone:
            rows = [(node.cards[at], -free[at], parts[at], at) for at in range(len(slots))]
            node.view = self._view(rows, node.free_cpu_milli(), node.free_memory_mib(), len(node.uses))
        else:
            node.view = None

    def _view(self, rows: list[tuple[int, int, int, int]], cpu_milli: int, memory_mib: int, load: int) -> View:
        rows.sort()
        key = (tuple([row[:3] for row in rows]), cpu_milli, memory_mib, load)
        state = self._states.get(key)
        if state is None:
            by_number = list(self.cards)
            state = self._states[key] = State(
                cards=tuple(row[0] for row in rows),
                free=tuple(-row[1] for row in rows),
                parts=tuple(row[2] for row in rows),
                cpu_milli=cpu_milli,
                memory_mib=memory_mib,
                load=load,
                kinds=tuple(by_number[row[0]] for row in rows),
            )
        return state, tuple([row[3] for row in rows])


def _end(holding: Holding, node: str) -> float:
    if holding.is_quarantined:
        return UNKNOWN
    if holding.is_ending or node in holding.giving_up:
        return AT_ONCE
    return UNKNOWN if holding.ends_at is None else holding.ends_at


def _free(end: float | None, count: int, parts: int) -> int:
    if end is None:
        return 0
    if not count:
        return WHOLE
    return max(0, parts - count) * (WHOLE // parts) if parts else 0
