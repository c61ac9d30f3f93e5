"""Protected starts: when and where a blocked request will start, and what later ones must leave alone for that."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from gpuhub.engines.bans import Ban
from gpuhub.engines.base import Request, Reservation, Share
from gpuhub.engines.fits import Bans
from gpuhub.engines.stock import AT_ONCE, UNKNOWN, Node, Stock
from gpuhub.engines.times import Claim, Times, used_cpu, used_memory

NOBODY = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A blocked request's start, as time limits tell."""

    request: Request
    #: `AT_ONCE` when it only waits for what is being given back; `UNKNOWN` when that has no known end.
    at: float
    #: The GPUs it counts on, by node; nodes without GPUs too.
    slots: Mapping[str, tuple[str, ...]]


@dataclass(slots=True, kw_only=True)
class Guard:
    """What must be left alone by requests that do not end before a moment."""

    #: Requests that end by then are free to use it; `NOBODY` for none.
    before: float
    bans: dict[str, Ban]
    #: For planning: until when it is not to be had.
    claims: dict[str, Claim]
    #: The reservation's, whose users it does not concern.
    reservation: str | None = None
    #: The request's whose start is kept possible.
    request: str | None = None

    def concerns(self, now: float, time_limit_s: float | None, admitted: Set[str]) -> bool:
        """Whether such a request, started now, must leave it alone."""
        if self.reservation in admitted:
            return False
        return time_limit_s is None or now + time_limit_s > self.before


class Guards:
    """All guards of one decision."""

    def __init__(self, stock: Stock, now: float, reservations: Sequence[Reservation]) -> None:
        self.now = now
        self._stock = stock
        self._all = [_reserved(each, stock) for each in reservations if each.ends_at > now]
        self._bans: dict[tuple[int, ...], Bans] = {}

    def add(self, guard: Guard) -> None:
        """From now on, this is to be left alone too."""
        self._all.append(guard)

    def bans(self, time_limit_s: float | None, admitted: Set[str], before: str | None = None) -> Bans | None:
        """What such a request may not use now; None for no ban. With `before`, as it was when that one was planned."""
        concerned: list[int] = []
        for number, guard in enumerate(self._all):
            if before is not None and guard.request == before:
                break
            if guard.concerns(self.now, time_limit_s, admitted):
                concerned.append(number)
        if not concerned:
            return None
        bans = self._bans.get(tuple(concerned))
        if bans is None:
            by_node: dict[str, Ban] = {}
            for number in concerned:
                for node, ban in self._all[number].bans.items():
                    by_node[node] = by_node[node].joined(ban) if node in by_node else ban
            bans = self._bans[tuple(concerned)] = Bans(self._stock, by_node)
        return bans

    def claims(self, admitted: Set[str]) -> dict[str, list[Claim]]:
        """What is promised to others, by node."""
        claims: dict[str, list[Claim]] = {}
        for guard in self._all:
            if guard.reservation not in admitted:
                for node, claim in guard.claims.items():
                    claims.setdefault(node, []).append(claim)
        return claims

    def granted(self, request: Request, shares: Sequence[Share], admitted: Set[str]) -> None:
        """A grant that outlasts a guard leaves less CPU and memory beside what the guard keeps."""
        if not (request.cpu_milli or request.memory_mib):
            return
        for guard in self._all:
            touched = [share.node for share in shares if share.node in guard.bans]
            if not touched or not guard.concerns(self.now, request.time_limit_s, admitted):
                continue
            for node in touched:
                ban = guard.bans[node]
                guard.bans[node] = Ban(
                    slots=ban.slots,
                    is_whole=ban.is_whole,
                    cpu_milli=None if ban.cpu_milli is None else max(0, ban.cpu_milli - request.cpu_milli),
                    memory_mib=None if ban.memory_mib is None else max(0, ban.memory_mib - request.memory_mib),
                )
            self._bans.clear()


def make_plan(
    request: Request, ways: Sequence[Times], claims: Mapping[str, Sequence[Claim]], stock: Stock
) -> Plan | None:
    """The earliest start, and where; None when the request fits nowhere as things are, whoever ends."""
    if request.spread is not None:
        plans = [_spread_plan(request, request.spread, times, claims, stock) for times in ways]
    else:
        plans = [_shaped_plan(request, times, claims, stock) for times in ways]
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.at, default=None)


def protect(plan: Plan, now: float, claims: Mapping[str, Sequence[Claim]], stock: Stock) -> Guard:
    """What keeps a plan possible."""
    request = plan.request
    start = max(plan.at, now)
    until = UNKNOWN if request.time_limit_s is None else start + request.time_limit_s
    guard = Guard(before=NOBODY if plan.at == UNKNOWN else start, bans={}, claims={}, request=request.id)
    for name, uuids in plan.slots.items():
        slots, node = frozenset(uuids), stock.nodes[name]
        guard.bans[name] = Ban(
            slots=slots,
            is_whole=request.exclusive,
            cpu_milli=_left_cpu(node, request, plan.at, claims.get(name, ())),
            memory_mib=_left_memory(node, request, plan.at, claims.get(name, ())),
        )
        guard.claims[name] = Claim(
            slots=slots,
            until=until,
            is_whole=request.exclusive,
            cpu_milli=request.cpu_milli,
            memory_mib=request.memory_mib,
        )
    return guard


def keep(slots: Mapping[str, frozenset[str]]) -> Guard:
    """Without backfill, what a blocked request could ever use is left alone by all that come later."""
    return Guard(before=NOBODY, bans={node: Ban(slots=uuids) for node, uuids in slots.items()}, claims={})


def _reserved(reservation: Reservation, stock: Stock) -> Guard:
    guard = Guard(before=reservation.starts_at, bans={}, claims={}, reservation=reservation.id)
    for name, node in stock.nodes.items():
        slots = reservation.uuids & node.positions.keys()
        if slots:
            guard.bans[name] = Ban(slots=slots)
            guard.claims[name] = Claim(slots=slots, until=reservation.ends_at)
    return guard


def _shaped_plan(request: Request, times: Times, claims: Mapping[str, Sequence[Claim]], stock: Stock) -> Plan | None:
    openings = times.openings(claims)
    nodes, gpus = request.least_nodes, times.kind.gpus
    if len(openings) < nodes:
        return None
    at = min(openings.values()) if nodes == 1 else sorted(openings.values())[nodes - 1]
    sooner = [name for name, opening in openings.items() if opening < at] if nodes > 1 else []
    then = [name for name, opening in openings.items() if opening == at]
    if at == UNKNOWN:
        # Where no end is known, the nodes that have most already.
        then.sort(key=lambda name: (times.lacking(name, claims), name))
    else:
        then.sort()
    chosen = sooner + then[: nodes - len(sooner)]
    slots = {}
    for name in chosen:
        slots[name] = tuple(stock.nodes[name].supply.slots[place].uuid for _, place in times.gpus(name, claims)[:gpus])
    return Plan(request=request, at=at, slots=slots)


def _spread_plan(
    request: Request, gpus: int, times: Times, claims: Mapping[str, Sequence[Claim]], stock: Stock
) -> Plan | None:
    openings = times.openings(claims)
    # As many nodes as GPUs: the first GPUs of these alone are enough, and none elsewhere is sooner.
    first = heapq.nsmallest(gpus, ((opening, name) for name, opening in openings.items()))
    found = [(max(end, opening), name, place) for opening, name in first for end, place in times.gpus(name, claims)]
    if len(found) < gpus:
        return None
    found.sort()
    slots: dict[str, tuple[str, ...]] = {}
    for _, name, place in found[:gpus]:
        slots[name] = (*slots.get(name, ()), stock.nodes[name].supply.slots[place].uuid)
    return Plan(request=request, at=found[gpus - 1][0] if gpus else AT_ONCE, slots=slots)


def _left_cpu(node: Node, request: Request, at: float, claims: Sequence[Claim]) -> int | None:
    if node.supply.cpu_milli is None or not request.cpu_milli:
        return None
    return _left(node.supply.cpu_milli - request.cpu_milli, at, used_cpu(node, claims))


def _left_memory(node: Node, request: Request, at: float, claims: Sequence[Claim]) -> int | None:
    if node.supply.memory_mib is None or not request.memory_mib:
        return None
    return _left(node.supply.memory_mib - request.memory_mib, at, used_memory(node, claims))


def _left(there: int, at: float, used: Sequence[tuple[float, int]]) -> int:
    """What others may use from now until after the plan's start; where that is unknown, all use counts."""
    return max(0, there - sum(amount for end, amount in used if end > at or at == UNKNOWN))
