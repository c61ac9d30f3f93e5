"""One decision: down the line, everyone gets what fits beside what is kept for those before."""

from __future__ import annotations

from gpuhub.engines import preempt
from gpuhub.engines.backfill import Guards, Plan, keep, make_plan, protect
from gpuhub.engines.base import Decision, Grant, Holding, Preemption, Request, Share
from gpuhub.engines.candidates import candidate_slots
from gpuhub.engines.fits import Bans
from gpuhub.engines.gangs import needed_units, note, place
from gpuhub.engines.limits import Rooms
from gpuhub.engines.mirror import Mirror, Ways
from gpuhub.engines.order import Group, Line

#: After so many that were not granted, it is worth while to look which groups matter.
_MOST_STEPS = 64


class Walk:
    """What follows at one moment. Grants and preemptions are marked in the stock at once; `undo` takes them back.

    With `plans_all` every blocked request gets a protected start: not a decision, but a forecast.
    """

    def __init__(self, mirror: Mirror, now: float, *, plans_all: bool = False) -> None:
        self.now = now
        self.grants: dict[str, Grant] = {}
        self.preemptions: list[Preemption] = []
        #: Starts of blocked requests, in their order.
        self.plans: dict[str, Plan] = {}
        self.guards = Guards(mirror.stock, now, mirror.reservations)
        self.rooms = Rooms(mirror.accounts, mirror.rights, now)
        self._mirror = mirror
        self._rules = mirror.rules
        self._plans_all = plans_all
        self._before: dict[str, Holding] = {}
        #: The plans of the round before; None in the first.
        self._settled: dict[str, Plan] | None = None
        self._penalties = mirror.penalties(now)
        self._begin()

    def _begin(self) -> None:
        self.plans.clear()
        self.guards = Guards(self._mirror.stock, self.now, self._mirror.reservations)
        self._counted = 0
        self._covered: set[int] = set()
        self._line = Line(self._mirror.entries, self._mirror.group_of, self._penalties)

    def run(self) -> None:
        """Go down the line until nothing more follows: what is granted to one may change what others count on."""
        self._go_down(None)
        done = 0
        while len(self.grants) + len(self.preemptions) > done:
            done = len(self.grants) + len(self.preemptions)
            self._settled = dict(self.plans)
            self._begin()
            self._go_down(None)

    def run_to(self, request_id: str) -> None:
        """Go down the line once, to a request, that one included."""
        self._go_down(request_id)

    def _go_down(self, until: str | None) -> None:
        for group, request_id in self._line:
            request = self._mirror.requests[request_id]
            if request_id in self.grants:
                self._line.deal_with(group, request.owner)
            elif not self.rooms.may(request.owner, request):
                self._line.pass_over(group, request.owner)
            else:
                self._serve(group, request)
            if request_id == until:
                return
            if self._line.is_narrow:
                continue
            if self._is_enough() and self.plans == self._settled:
                # The same plans as in the round before: nothing new can follow.
                return
            if self._is_enough() or self._line.steps - len(self.grants) > _MOST_STEPS:
                self._line.narrow(group for group in self._mirror.groups if self._matters(group))

    def decision(self) -> Decision:
        """What it comes to."""
        edges = {moment for each in self._mirror.reservations for moment in (each.starts_at, each.ends_at)}
        if self.rooms.look_again_at is not None:
            edges.add(self.rooms.look_again_at)
        return Decision(
            grants=self.grants,
            preemptions=tuple(self.preemptions),
            look_again_at=min((moment for moment in edges if moment > self.now), default=None),
        )

    def undo(self) -> None:
        """Nothing of this happened."""
        for request_id in self.grants:
            self._mirror.stock.release(request_id)
        for holding in self._before.values():
            self._mirror.stock.hold(holding)

    def _serve(self, group: Group, request: Request) -> None:
        ways = self._mirror.ways(group)
        bans = self.guards.bans(request.time_limit_s, group.admitted)
        shares = place(request, ways.fits, bans, self.rooms.most(request.owner))
        if shares is not None:
            self._grant(group, request, shares)
            self._line.deal_with(group, request.owner)
        elif not (self._rules.backfill or self._plans_all):
            self._keep(group, request, ways)
            self._line.close(group)
        elif self._is_kept_waiting(group, request, ways, bans):
            self._line.close(group)
        else:
            self._protect(group, request, ways)

    def _grant(self, group: Group, request: Request, shares: tuple[Share, ...]) -> None:
        self.guards.granted(request, shares, group.admitted)
        self.rooms.granted(request, sum(len(share.slots) for share in shares))
        ends_at = None if request.time_limit_s is None else self.now + request.time_limit_s
        self._mirror.stock.hold(Holding(request=request, shares=shares, granted_at=self.now, ends_at=ends_at))
        self.grants[request.id] = Grant(shares=shares, note=note(shares))

    def _keep(self, group: Group, request: Request, ways: Ways) -> None:
        """Without backfill: everything that the request could ever use, if it can be served as things are."""
        stock = self._mirror.stock
        if not request.size or self._is_reserved_only(group, request, ways):
            return
        if make_plan(request, ways.times, {}, stock) is not None:
            self.guards.add(keep(candidate_slots(request, stock)))

    def _is_kept_waiting(self, group: Group, request: Request, ways: Ways, bans: Bans | None) -> bool:
        """Whether nothing is to be planned for it: enough others are protected, or only a reservation is in the way."""
        if self._plans_all:
            return False
        if self._is_beyond(ways) and not self._may_preempt(request):
            return True
        return bans is not None and self._is_reserved_only(group, request, ways)

    def _is_reserved_only(self, group: Group, request: Request, ways: Ways) -> bool:
        everything = frozenset(each.id for each in self._mirror.reservations)
        if everything == group.admitted:
            return False
        bans = self.guards.bans(request.time_limit_s, everything)
        needed = needed_units(request)
        return any(way.count(bans) >= needed for way in ways.fits)

    def _is_enough(self) -> bool:
        return self._counted >= self._rules.protected and not self._plans_all

    def _is_beyond(self, ways: Ways) -> bool:
        """The protected ones are enough, and one of them is first in line for these cards."""
        return self._is_enough() and not self._covered.isdisjoint(ways.cards)

    def _matters(self, group: Group) -> bool:
        """Whether a request of the group may yet be granted or planned."""
        ways = self._mirror.ways(group)
        if not self._is_beyond(ways) or self._may_preempt(group.sample):
            return True
        needed = needed_units(group.sample)
        bans = self.guards.bans(group.sample.time_limit_s, group.admitted)
        return any(way.count(bans) >= needed for way in ways.fits)

    def _may_preempt(self, request: Request) -> bool:
        return self._rules.preemption and not request.scavenge and not self._plans_all

    def _protect(self, group: Group, request: Request, ways: Ways) -> None:
        """Plan the request's start, by preemption if need be, and keep that possible."""
        mirror, times = self._mirror, ways.times
        claims = self.guards.claims(group.admitted)
        plan = make_plan(request, times, claims, mirror.stock)
        if self._may_preempt(request) and (plan is None or plan.at > self.now):
            plan = self._preempt(request, group, ways, plan)
        is_given_back = plan is not None and self._may_preempt(request) and plan.at <= self.now
        if plan is None or (self._is_beyond(ways) and not is_given_back):
            self._line.close(group)
            return
        self._counted += not is_given_back
        self._covered |= ways.cards
        self.plans[request.id] = plan
        self.guards.add(protect(plan, self.now, claims, mirror.stock))
        self._line.deal_with(group, request.owner)

    def _preempt(self, request: Request, group: Group, ways: Ways, plan: Plan | None) -> Plan | None:
        """The plan after taking back what the request needs; as it was when that does not help."""
        mirror = self._mirror
        claims = self.guards.claims(group.admitted)
        chosen = preempt.choose(request, ways.times, claims, mirror.stock, self.now)
        for preemption in chosen:
            self._before.setdefault(preemption.holding, mirror.stock.holdings[preemption.holding])
            mirror.stock.give_up(preemption.holding, preemption.nodes)
        self.preemptions += chosen
        return make_plan(request, ways.times, claims, mirror.stock) if chosen else plan
