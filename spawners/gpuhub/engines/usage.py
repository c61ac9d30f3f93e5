"""GPU-time used: decayed and weighted by card for fair share, real hours of the last seven days for limits.

Decayed use is kept in closed form: of a use at rate r from b to e, r·(2^(e/h) − 2^(b/h))·h/ln 2 is kept, in units that
halve with every half-life h, so that reading it at any moment takes one power of two and no walk through time.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field

from gpuhub.engines.base import Holding, Rules, Spent
from gpuhub.gpus import Card

WEEK_S = 7 * 86400.0
#: Powers of two beyond this many half-lives are brought back to size.
_MOST_HALF_LIVES = 256.0
#: GPU-seconds below which use may be nothing but rounding: differences of large sums.
_LEAST_USE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Use of so many GPUs, from then until then."""

    began_at: float
    ended_at: float
    gpus: float

    def hours_within(self, start: float, end: float) -> float:
        """GPU-hours between two moments."""
        return self.gpus * max(0.0, min(self.ended_at, end) - max(self.began_at, start)) / 3600.0


@dataclass(slots=True)
class Account:
    """What an owner, or a group, used and uses."""

    #: Decayed use that is over, and what running use had reached when it began; rate of running use.
    ended: float = 0.0
    begun: float = 0.0
    rate: float = 0.0
    #: Held GPUs, a part of one counting as one.
    gpus: int = 0
    spans: deque[Span] = field(default_factory=deque)
    #: Running use, by holding.
    running: dict[str, Span] = field(default_factory=dict)


class Accounts:
    """The accounts of all owners and groups."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._origin: float | None = None
        self._owners: defaultdict[str, Account] = defaultdict(Account)
        self._groups: defaultdict[str, Account] = defaultdict(Account)
        self._all = Account()
        self._holders: set[str] = set()

    @property
    def owners(self) -> Iterable[str]:
        """Everyone known."""
        return self._owners

    @property
    def holders(self) -> Set[str]:
        """Everyone who holds something that counts. Not to be changed."""
        return self._holders

    def held(self, owner: str) -> int:
        """GPUs that an owner holds."""
        return self._owners[owner].gpus if owner in self._owners else 0

    def held_by_group(self, group: str) -> int:
        """GPUs that all members of a group hold."""
        return self._groups[group].gpus if group in self._groups else 0

    def hours(self, owner: str, now: float) -> float:
        """Real GPU-hours of the last seven days."""
        return _hours(self._owners[owner], now) if owner in self._owners else 0.0

    def hours_of_group(self, group: str, now: float) -> float:
        """Real GPU-hours of the last seven days of all members of a group."""
        return _hours(self._groups[group], now) if group in self._groups else 0.0

    def hours_below_at(self, owner: str, most: float, now: float) -> float | None:
        """When the owner's hours will be below; None when that is not known."""
        return _below_at(self._owners[owner], most, now)

    def hours_of_group_below_at(self, group: str, most: float, now: float) -> float | None:
        """When the group's hours will be below; None when that is not known."""
        return _below_at(self._groups[group], most, now)

    def begin(self, holding: Holding) -> None:
        """A holding counts from when it was granted; one in quarantine does not."""
        if holding.is_quarantined:
            return
        self._count(holding, 1)

    def end(self, holding: Holding, now: float | None) -> None:
        """A holding is over and its time is spent until now, or it is replaced (None) and its time counts anew."""
        if holding.is_quarantined:
            return
        self._count(holding, -1)
        if now is not None:
            for share in holding.shares:
                for slot in share.slots:
                    self.spend(
                        Spent(
                            owner=holding.request.owner,
                            groups=holding.request.groups,
                            card=slot.card,
                            share=holding.request.share,
                            began_at=holding.granted_at,
                            ended_at=max(now, holding.granted_at),
                        )
                    )

    def spend(self, spent: Spent) -> None:
        """Add use that is over."""
        rate = self._value(spent.card) / spent.share
        used = rate * (self._power(spent.ended_at) - self._power(spent.began_at))
        span = Span(began_at=spent.began_at, ended_at=spent.ended_at, gpus=1 / spent.share)
        for account in self._concerned(spent.owner, spent.groups):
            account.ended += used
            if account is not self._all:
                _remember(account.spans, span)

    def decayed(self, now: float) -> Callable[[str | None], float]:
        """Decayed use in GPU-seconds of a 24 GiB card, by owner; of all for None. Less than one counts as none."""
        power = self._power(now)
        factor = self._rules.half_life_s / math.log(2)

        owners, everyone = self._owners, self._all

        def of(owner: str | None) -> float:
            account = everyone if owner is None else owners.get(owner)
            if account is None:
                return 0.0
            used: float = factor * ((account.ended - account.begun) / power + account.rate)
            return used if used >= _LEAST_USE else 0.0

        return of

    def _count(self, holding: Holding, sign: int) -> None:
        request = holding.request
        slots = [slot for share in holding.shares for slot in share.slots]
        rate = sum(self._value(slot.card) for slot in slots) / request.share * sign
        begun = rate * self._power(holding.granted_at)
        for account in self._concerned(request.owner, request.groups):
            account.gpus += len(slots) * sign
            account.rate += rate
            account.begun += begun
            if account is self._all:
                continue
            if sign > 0:
                account.running[request.id] = Span(
                    began_at=holding.granted_at, ended_at=math.inf, gpus=len(slots) / request.share
                )
            else:
                account.running.pop(request.id, None)
                if not account.running:
                    account.rate = account.begun = 0.0
        if self._owners[request.owner].running:
            self._holders.add(request.owner)
        else:
            self._holders.discard(request.owner)

    def _concerned(self, owner: str, groups: Iterable[str]) -> Iterator[Account]:
        yield self._owners[owner]
        yield self._all
        for group in groups:
            yield self._groups[group]

    def _value(self, card: Card) -> float:
        return self._rules.card_values.get(card.model, card.memory_mib / 24576)

    def _power(self, moment: float) -> float:
        """2 to the number of half-lives since the accounts' origin."""
        if self._origin is None:
            self._origin = moment
        lives = (moment - self._origin) / self._rules.half_life_s
        if lives > _MOST_HALF_LIVES:
            factor = math.exp2(-lives)
            for account in (self._all, *self._owners.values(), *self._groups.values()):
                account.ended *= factor
                account.begun *= factor
            self._origin, lives = moment, 0.0
        return math.exp2(lives)


def _remember(spans: deque[Span], span: Span) -> None:
    """Add a span, and forget those that are a week older."""
    spans.append(span)
    while spans[0].ended_at < span.ended_at - WEEK_S:
        spans.popleft()


def _hours(account: Account, now: float) -> float:
    spans = (*account.spans, *account.running.values())
    return sum(span.hours_within(now - WEEK_S, now) for span in spans)


def _below_at(account: Account, most: float, now: float) -> float | None:
    """Hours change at an even rate between the moments at which a span begins to leave the week, or has left it."""
    spans = [*account.spans, *account.running.values()]
    edges = {moment + WEEK_S for span in spans for moment in (span.began_at, span.ended_at) if moment + WEEK_S > now}
    before, had = now, _hours(account, now)
    for edge in sorted(edges):
        if edge == math.inf:
            break
        has = sum(span.hours_within(edge - WEEK_S, edge) for span in spans)
        if has < most:
            # A second later, so that it is below and not just reached.
            return before + (edge - before) * (had - most) / (had - has) + 1.0
        before, had = edge, has
    return None
