"""The engine's picture of what the broker has stored, with everything that is remembered to decide quickly."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from gpuhub.engines.base import Holding, Request, Reservation, Rights, Rules, World
from gpuhub.engines.fits import Fits
from gpuhub.engines.kinds import Kind, kinds_of
from gpuhub.engines.order import Entry, Group, entry_of, penalty_s
from gpuhub.engines.placement import Demand, MakePolicy
from gpuhub.engines.stock import Stock
from gpuhub.engines.times import Times
from gpuhub.engines.usage import Accounts

#: What is remembered about kinds of demands is thrown away beyond so many.
_MOST_KINDS = 1024
#: The policy learns what is typical after so many requests, then after twice as many as before, at most so many.
_FIRST_LESSON, _LAST_LESSON = 32, 8192

#: Stands among cards for a demand without GPU.
NO_GPU = frozenset({-1})


class Ways(NamedTuple):
    """The ways to serve a group's requests, best first."""

    #: Of the stock for which they were found.
    epoch: int
    fits: tuple[Fits, ...]
    times: tuple[Times, ...]
    #: Numbers of the cards that will do; `NO_GPU` for a demand without GPU.
    cards: frozenset[int]


class Mirror:
    """Nodes, requests, holdings, rights, reservations and use."""

    def __init__(self, world: World, rules: Rules, make_policy: MakePolicy) -> None:
        self.rules = rules
        self.stock = Stock()
        self.accounts = Accounts(rules)
        self.requests: dict[str, Request] = {}
        self.rights: dict[str, Rights] = dict(world.rights)
        self.reservations: tuple[Reservation, ...] = ()
        self._groups: dict[object, Group] = {}
        self._make_policy = make_policy
        #: What each owner waits for, in order.
        self.entries: dict[str, list[Entry]] = {}
        self.group_of: dict[str, Group] = {}
        self._fits: dict[Kind, Fits] = {}
        self._times: dict[Kind, Times] = {}
        self._ways: dict[Group, Ways] = {}
        self._asked: Counter[Demand] = Counter()
        self._policy = make_policy(())
        self._lesson = _FIRST_LESSON
        self._unlearned = 0
        for node in world.nodes:
            self.stock.put_node(node)
        self.reservations = tuple(world.reservations)
        for spent in sorted(world.spent, key=lambda each: each.ended_at):
            self.accounts.spend(spent)
        for holding in world.holdings:
            self.put_holding(holding)
        for request in world.requests:
            self.put_request(request)
        self._learn()

    # -- changes --------------------------------------------------------------------------------------------------

    def put_request(self, request: Request) -> None:
        """Add or replace a waiting request."""
        self.drop_request(request.id)
        self.requests[request.id] = request
        insort(self.entries.setdefault(request.owner, []), entry_of(request, self.rules))
        self._unlearned += 1
        self._join_group(request)

    def drop_request(self, request_id: str) -> None:
        """A request no longer waits."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        entry, entries = entry_of(request, self.rules), self.entries[request.owner]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self.entries[request.owner]
        group = self.group_of.pop(request_id)
        group.remove(request.owner, entry)
        if not group.heads:
            del self._groups[group.key]
            self._ways.pop(group, None)

    def put_holding(self, holding: Holding) -> None:
        """Add or replace a holding."""
        before = self.stock.holdings.get(holding.request.id)
        if before is not None:
            self.accounts.end(before, None)
        self.stock.hold(holding)
        self.accounts.begin(holding)

    def drop_holding(self, holding_id: str, now: float) -> None:
        """A holding is over."""
        holding = self.stock.release(holding_id)
        if holding is not None:
            self.accounts.end(holding, now)

    def put_reservations(self, reservations: Iterable[Reservation]) -> None:
        """Replace all reservations; requests are grouped anew by whom these admit."""
        self.reservations = tuple(reservations)
        self._groups.clear()
        self._ways.clear()
        for request in self.requests.values():
            self._join_group(request)

    # -- looking --------------------------------------------------------------------------------------------------

    def penalties(self, now: float) -> dict[str, float]:
        """By how much each waiting owner is put back."""
        weights = {owner: self._weight(owner) for owner in self.entries}
        holders = self.accounts.holders - weights.keys()
        together = sum(weights.values()) + sum(self._weight(owner) for owner in holders)
        decayed = self.accounts.decayed(now)
        used_by_all = decayed(None)
        return {
            owner: penalty_s(decayed(owner), used_by_all, weight / together, self.rules)
            for owner, weight in weights.items()
        }

    def _weight(self, owner: str) -> float:
        rights = self.rights.get(owner)
        return 1.0 if rights is None else rights.weight

    @property
    def groups(self) -> Iterable[Group]:
        """All groups of waiting requests."""
        return self._groups.values()

    def ways(self, group: Group) -> Ways:
        """The ways to serve a group's requests."""
        known = self._ways.get(group)
        if known is None or known.epoch != self.stock.epoch:
            known = self._find_ways(group.sample)
            self._ways[group] = known
        return known

    def fits_of(self, request: Request) -> tuple[Fits, ...]:
        """Where a request that does not wait would fit now."""
        return self._find_ways(request).fits

    def learn(self) -> None:
        """Let the policy know what is asked for, now and then: every time it answers anew what it had remembered."""
        if self._unlearned >= self._lesson:
            self._learn()

    def _learn(self) -> None:
        self._lesson = min(max(2 * self._unlearned, self._lesson), _LAST_LESSON)
        self._unlearned = 0
        for demand in list(self._asked):
            self._asked[demand] //= 2
        for group in self._groups.values():
            for way in self.ways(group).fits[-1:]:
                self._asked[way.demand(way.kind.gpus)] += sum(map(len, group.by_owner.values()))
        self._asked += Counter()
        self._policy = self._make_policy(tuple((demand, float(count)) for demand, count in self._asked.items()))
        for fits in self._fits.values():
            fits.use(self._policy)

    def _find_ways(self, request: Request) -> Ways:
        kinds = kinds_of(request, self.stock.cards)
        if len(self._fits) + len(kinds) > _MOST_KINDS:
            self._fits.clear()
            self._times.clear()
            self._ways.clear()
        for kind in kinds:
            if kind not in self._fits:
                self._fits[kind] = Fits(kind, self.stock, self._policy)
                self._times[kind] = Times(kind, self.stock)
        fits = tuple(self._fits[kind] for kind in kinds)
        times = tuple(self._times[kind] for kind in kinds if not kind.joins)
        cards = frozenset(number for way in fits for number in way.accepted) if request.size else NO_GPU
        return Ways(epoch=self.stock.epoch, fits=fits, times=times, cards=cards)

    def _join_group(self, request: Request) -> None:
        """Requests that ask for the same, and are admitted by the same reservations, form one group."""
        admitted = frozenset(each.id for each in self.reservations if each.admits(request.owner, request.groups))
        key = (
            request.nodes,
            request.least_nodes,
            request.gpus_per_node,
            request.spread,
            request.requirement,
            request.share,
            request.exclude,
            request.exclusive,
            request.same_model,
            request.scavenge,
            request.time_limit_s,
            request.cpu_milli,
            request.memory_mib,
            admitted,
        )
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key=key, sample=request, admitted=admitted)
        self.group_of[request.id] = group
        group.add(request.owner, entry_of(request, self.rules))
