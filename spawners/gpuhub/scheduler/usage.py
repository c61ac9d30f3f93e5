"""GPU usage: decayed and weighted by card for fair share, real hours of the last seven days for quotas.

Decayed usage is kept in closed form: for use at rate r from b to e, r·(2^(e/h) − 2^(b/h))·h/ln 2 is added, in units
that halve with every half-life h. Reading it at any moment takes one power of two and no loop over time.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field

from gpuhub.common.gpu import GpuSpec
from gpuhub.scheduler.interface import Allocation, SchedulingParameters, UsageRecord

WEEK_S = 7 * 86400.0
#: Spans within the same slot of this length are joined, seconds; so far may the weekly hours be off, a week later.
_SLOT_S = 600.0
#: Powers of two are normalised beyond this many half-lives.
_MAX_HALF_LIVES = 256.0
#: Minimum usage that counts, GPU-seconds: less may be a rounding error of the difference of large sums.
_MIN_USAGE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSpan:
    """Use of some GPUs between two moments."""

    started_at: float
    ended_at: float
    gpus: float

    def hours_within(self, start: float, end: float) -> float:
        return self.gpus * max(0.0, min(self.ended_at, end) - max(self.started_at, start)) / 3600.0


@dataclass(slots=True)
class UsageAccount:
    """Usage of an owner or a group."""

    #: Decayed: ended usage; what running usage had reached when it started; rate of running usage.
    ended: float = 0.0
    started: float = 0.0
    rate: float = 0.0
    #: Held GPUs; a GPU share counts as one.
    gpus: int = 0
    spans: deque[UsageSpan] = field(default_factory=deque)
    #: Running usage by allocation.
    running: dict[str, UsageSpan] = field(default_factory=dict)


class UsageLedger:
    """The accounts of all owners and groups."""

    def __init__(self, parameters: SchedulingParameters) -> None:
        self._parameters = parameters
        self._origin: float | None = None
        self._owners: defaultdict[str, UsageAccount] = defaultdict(UsageAccount)
        self._groups: defaultdict[str, UsageAccount] = defaultdict(UsageAccount)
        self._all = UsageAccount()
        self._active_owners: set[str] = set()

    @property
    def owners(self) -> Iterable[str]:
        return self._owners

    @property
    def active_owners(self) -> Set[str]:
        """The owners of allocations that are counted; not to be changed."""
        return self._active_owners

    def count_gpus(self, owner: str) -> int:
        return self._owners[owner].gpus if owner in self._owners else 0

    def count_group_gpus(self, group: str) -> int:
        return self._groups[group].gpus if group in self._groups else 0

    def week_hours(self, owner: str, now: float) -> float:
        """Return the real GPU-hours of the last seven days."""
        return _sum_week_hours(self._owners[owner], now) if owner in self._owners else 0.0

    def group_week_hours(self, group: str, now: float) -> float:
        """Return the real GPU-hours of the last seven days of all members of a group."""
        return _sum_week_hours(self._groups[group], now) if group in self._groups else 0.0

    def find_time_below(self, owner: str, limit: float, now: float) -> float | None:
        """Return when the owner's weekly hours will be below `limit`; None if that is not known."""
        return _find_time_below(self._owners[owner], limit, now)

    def find_group_time_below(self, group: str, limit: float, now: float) -> float | None:
        """Return when the group's weekly hours will be below `limit`; None if that is not known."""
        return _find_time_below(self._groups[group], limit, now)

    def start_allocation(self, allocation: Allocation) -> None:
        """Count an allocation from its grant on, unless it is quarantined."""
        if allocation.is_quarantined:
            return
        self._count(allocation, 1)

    def end_allocation(self, allocation: Allocation, now: float | None) -> None:
        """Stop counting an allocation: its usage until `now` is kept, or dropped with None, since the allocation is
        replaced.
        """
        if allocation.is_quarantined:
            return
        self._count(allocation, -1)
        if now is not None:
            for node_allocation in allocation.node_allocations:
                for slot in node_allocation.slots:
                    self.record(
                        UsageRecord(
                            owner=allocation.request.owner,
                            groups=allocation.request.groups,
                            card=slot.card,
                            share=allocation.request.share,
                            started_at=allocation.granted_at,
                            ended_at=max(now, allocation.granted_at),
                        )
                    )

    def record(self, record: UsageRecord) -> None:
        rate = self._card_weight(record.card) * record.gpus / record.share
        used = rate * (self._power(record.ended_at) - self._power(record.started_at))
        gpus = record.gpus / record.share
        span = UsageSpan(started_at=record.started_at, ended_at=record.ended_at, gpus=gpus)
        for account in self._accounts_of(record.owner, record.groups):
            account.ended += used
            if account is not self._all:
                _append_span(account.spans, span)

    def decayed_usage(self, now: float) -> Callable[[str | None], float]:
        """Return a function for decayed usage by owner, in GPU-seconds of a 24 GiB card; None stands for all owners.

        Usage below one GPU-second counts as zero.
        """
        power = self._power(now)
        factor = self._parameters.half_life_s / math.log(2)

        owners, all_owners = self._owners, self._all

        def get_decayed(owner: str | None) -> float:
            account = all_owners if owner is None else owners.get(owner)
            if account is None:
                return 0.0
            used: float = factor * ((account.ended - account.started) / power + account.rate)
            return used if used >= _MIN_USAGE else 0.0

        return get_decayed

    def _count(self, allocation: Allocation, sign: int) -> None:
        request = allocation.request
        slots = [slot for node_allocation in allocation.node_allocations for slot in node_allocation.slots]
        rate = sum(self._card_weight(slot.card) for slot in slots) / request.share * sign
        begun = rate * self._power(allocation.granted_at)
        for account in self._accounts_of(request.owner, request.groups):
            account.gpus += len(slots) * sign
            account.rate += rate
            account.started += begun
            if account is self._all:
                continue
            if sign > 0:
                account.running[request.id] = UsageSpan(
                    started_at=allocation.granted_at, ended_at=math.inf, gpus=len(slots) / request.share
                )
            else:
                account.running.pop(request.id, None)
                if not account.running:
                    account.rate = account.started = 0.0
        if self._owners[request.owner].running:
            self._active_owners.add(request.owner)
        else:
            self._active_owners.discard(request.owner)

    def _accounts_of(self, owner: str, groups: Iterable[str]) -> Iterator[UsageAccount]:
        yield self._owners[owner]
        yield self._all
        for group in groups:
            yield self._groups[group]

    def _card_weight(self, card: GpuSpec) -> float:
        return self._parameters.card_values.get(card.model, card.memory_mib / 24576)

    def _power(self, moment: float) -> float:
        """Return 2 to the power of the half-lives since the ledger's origin."""
        if self._origin is None:
            self._origin = moment
        half_lives = (moment - self._origin) / self._parameters.half_life_s
        if half_lives > _MAX_HALF_LIVES:
            factor = math.exp2(-half_lives)
            for account in (self._all, *self._owners.values(), *self._groups.values()):
                account.ended *= factor
                account.started *= factor
            self._origin, half_lives = moment, 0.0
        return math.exp2(half_lives)


def _append_span(spans: deque[UsageSpan], span: UsageSpan) -> None:
    """Add a span, and drop those that ended a week before it.

    A short one is joined to the last one if both are within the same few minutes: thousands of short leases a day would
    make every later sum longer.
    """
    last = spans[-1] if spans else None
    if last is not None and _slot_of(last) is not None and _slot_of(last) == _slot_of(span):
        spans[-1] = _join(last, span)
    else:
        spans.append(span)
    while spans[0].ended_at < span.ended_at - WEEK_S:
        spans.popleft()


def _slot_of(span: UsageSpan) -> float | None:
    """Return the number of the slot in which the whole span is; None if it reaches into several."""
    first = span.started_at // _SLOT_S
    return first if span.ended_at // _SLOT_S == first else None


def _join(first: UsageSpan, second: UsageSpan) -> UsageSpan:
    """Return one span over both with the sum of their GPU time."""
    started_at, ended_at = min(first.started_at, second.started_at), max(first.ended_at, second.ended_at)
    if started_at == ended_at:
        return first
    gpu_s = sum(span.gpus * (span.ended_at - span.started_at) for span in (first, second))
    return UsageSpan(started_at=started_at, ended_at=ended_at, gpus=gpu_s / (ended_at - started_at))


def _sum_week_hours(account: UsageAccount, now: float) -> float:
    spans = (*account.spans, *account.running.values())
    return sum(span.hours_within(now - WEEK_S, now) for span in spans)


def _find_time_below(account: UsageAccount, limit: float, now: float) -> float | None:
    """Return when the weekly hours fall below `limit`; None if that is not known.

    Hours change at a constant rate between the moments at which a span starts to leave the window, or has left it.
    """
    spans = [*account.spans, *account.running.values()]
    edges = {moment + WEEK_S for span in spans for moment in (span.started_at, span.ended_at) if moment + WEEK_S > now}
    before, hours_before = now, _sum_week_hours(account, now)
    for edge in sorted(edges):
        if edge == math.inf:
            break
        hours = sum(span.hours_within(edge - WEEK_S, edge) for span in spans)
        if hours < limit:
            # One second later, so that the hours are below the limit and not equal to it.
            return before + (edge - before) * (hours_before - limit) / (hours_before - hours) + 1.0
        before, hours_before = edge, hours
    return None
