"""Positions of waiting requests in the queue, computed when they are read and not at every change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuhub.broker.state.ledger import Ledger
from gpuhub.domain.clock import Clock
from gpuhub.domain.models import LeaseRow
from gpuhub.scheduler.interface import PendingReason, Scheduler

#: Positions are computed again after this time even if nothing changed, seconds.
REFRESH_S = 1.0
#: With more waiting requests than this, positions are not computed more often.
MANY = 200
#: Fraction of the time that may be spent on pending reasons, and the maximum between two refreshes, seconds.
BUDGET_SHARE = 0.1
BUDGET_S = 0.05
#: An expected start that moved by less counts as unchanged, seconds.
_SAME_S = 60.0
#: Text of a request whose reason was not computed yet.
_UNEXPLAINED = "it waits for its turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePosition:
    """The position of a waiting request."""

    #: Queue position, from 1.
    position: int
    #: One line for people.
    text: str
    #: Seconds since 1970; None if not known.
    expected_start: float | None
    #: Grows with every change of the other values.
    version: int


class QueuePositions(Mapping[str, QueuePosition]):
    """The positions of all waiting requests, by lease.

    Positions are those of one moment. The reason why a request waits is computed when it is read; if that would take
    too much of the broker's time, the last known reason is returned.
    """

    def __init__(self, ledger: Ledger, scheduler: Scheduler, clock: Clock) -> None:
        self._ledger = ledger
        self._scheduler = scheduler
        self._clock = clock
        self._positions: dict[str, int] = {}
        self._positions_cache: dict[str, QueuePosition] = {}
        self._fresh: set[str] = set()
        self._seen_snapshot: object = None
        self._refreshed_at = float("-inf")
        self._budget_s = BUDGET_S

    def refresh(self) -> QueuePositions:
        """Drop outdated positions, and return itself."""
        waiting = self._ledger.index.find("waiting")
        age = self._clock.monotonic() - self._refreshed_at
        is_same = self._seen_snapshot is self._ledger.snapshot or len(waiting) > MANY
        if self._ledger.is_writing or (is_same and age < REFRESH_S):
            return self
        self._budget_s = min(BUDGET_S, self._budget_s + age * BUDGET_SHARE)
        self._seen_snapshot, self._refreshed_at = self._ledger.snapshot, self._clock.monotonic()
        order = self._scheduler.order_requests(self._clock.now()) if waiting else []
        self._positions = {lease: position for position, lease in enumerate(order, start=1)}
        self._fresh.clear()
        if len(self._positions_cache) > 2 * len(waiting) + MANY:
            self._positions_cache = {
                lease: position for lease, position in self._positions_cache.items() if lease in waiting
            }
        return self

    def find_version(self, lease: LeaseRow) -> int:
        """Return the version of a lease as its owner sees it, which grows with changes of its position."""
        position = self.refresh().get(lease.id)
        return lease.version if position is None else max(lease.version, position.version)

    def __getitem__(self, lease_id: str) -> QueuePosition:
        if not self._waits(lease_id):
            raise KeyError(lease_id)
        old = self._positions_cache.get(lease_id)
        # While a transaction is being written, the scheduler is ahead of the snapshot.
        if old is not None and (lease_id in self._fresh or self._ledger.is_writing):
            return old
        position = self._positions_cache[lease_id] = self._update(old, self._explain(lease_id, old))
        return position

    def __iter__(self) -> Iterator[str]:
        return iter([lease for lease in self._ledger.index.find("waiting") if self._waits(lease)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _waits(self, lease_id: str) -> bool:
        lease = self._ledger.snapshot.leases.get(lease_id)
        return lease is not None and lease.waits

    def _explain(self, lease_id: str, old: QueuePosition | None) -> PendingReason:
        position = self._positions.get(lease_id, len(self._positions) + 1)
        if self._budget_s <= 0:
            text, start = (_UNEXPLAINED, None) if old is None else (old.text, old.expected_start)
            return PendingReason(position=position, text=text, expected_start=start)
        began = self._clock.monotonic()
        try:
            reason = self._scheduler.explain_pending(lease_id, self._clock.now())
        except KeyError:
            # The request is granted, and the grant is being written.
            return PendingReason(position=position, text=_UNEXPLAINED, expected_start=None)
        self._budget_s -= self._clock.monotonic() - began
        self._fresh.add(lease_id)
        return reason

    def _update(self, old: QueuePosition | None, reason: PendingReason) -> QueuePosition:
        if old is not None and (old.position, old.text) == (reason.position, reason.text) and _is_close(old, reason):
            return old
        return QueuePosition(
            position=reason.position,
            text=reason.text,
            expected_start=reason.expected_start,
            version=self._ledger.next_version(),
        )


def _is_close(old: QueuePosition, reason: PendingReason) -> bool:
    if old.expected_start is None or reason.expected_start is None:
        return old.expected_start is reason.expected_start
    return abs(old.expected_start - reason.expected_start) < _SAME_S
