"""Where waiting requests stand: worked out when somebody looks, and not at every change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuhub.broker.clock import Clock
from gpuhub.broker.ledger import Ledger
from gpuhub.broker.schemas import LeaseState
from gpuhub.engines.base import Engine, Why

#: Places are worked out again after so long, also when nothing changed: time goes by. Seconds.
REFRESH_S = 1.0
#: With more waiting, not sooner than that.
MANY = 200
#: Of each second so much may be spent on finding out why requests wait, and so much at once, seconds.
BUDGET_SHARE = 0.1
BUDGET_S = 0.2
#: An expected start that moved by less is the same, seconds.
_SAME_S = 60.0
_IN_LINE = "it waits for its turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A waiting request's place."""

    #: From 1.
    position: int
    #: One line for a person.
    text: str
    #: Seconds since 1970; None where it is not known.
    expected_start: float | None
    #: Grew when the rest changed.
    version: int


class Places(Mapping[str, Place]):
    """The places of all waiting requests by lease.

    Positions are those of one moment; why a request waits is worked out when it is asked for, and where that would take
    too much of the broker's time, what was said before is said again.
    """

    def __init__(self, ledger: Ledger, engine: Engine, clock: Clock) -> None:
        self._ledger = ledger
        self._engine = engine
        self._clock = clock
        self._positions: dict[str, int] = {}
        self._known: dict[str, Place] = {}
        self._fresh: set[str] = set()
        self._seen: object = None
        self._at = float("-inf")
        self._budget_s = BUDGET_S

    def refresh(self) -> Places:
        """Forget what is out of date; returns itself."""
        waiting = self._ledger.index.find("waiting")
        age = self._clock.monotonic() - self._at
        is_same = self._seen is self._ledger.snapshot or len(waiting) > MANY
        if self._ledger.is_writing or (is_same and age < REFRESH_S):
            return self
        self._budget_s = min(BUDGET_S, self._budget_s + age * BUDGET_SHARE)
        self._seen, self._at = self._ledger.snapshot, self._clock.monotonic()
        order = self._engine.order(self._clock.now()) if waiting else []
        self._positions = {lease: position for position, lease in enumerate(order, start=1)}
        self._fresh.clear()
        if len(self._known) > 2 * len(waiting) + MANY:
            self._known = {lease: place for lease, place in self._known.items() if lease in waiting}
        return self

    def __getitem__(self, lease_id: str) -> Place:
        if not self._waits(lease_id):
            raise KeyError(lease_id)
        old = self._known.get(lease_id)
        # While a change is being written, the engine is ahead of what is seen.
        if old is not None and (lease_id in self._fresh or self._ledger.is_writing):
            return old
        place = self._known[lease_id] = self._follow(old, self._look(lease_id, old))
        return place

    def __iter__(self) -> Iterator[str]:
        return iter([lease for lease in self._ledger.index.find("waiting") if self._waits(lease)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _waits(self, lease_id: str) -> bool:
        lease = self._ledger.snapshot.leases.get(lease_id)
        return lease is not None and lease.state is LeaseState.REQUESTED

    def _look(self, lease_id: str, old: Place | None) -> Why:
        position = self._positions.get(lease_id, len(self._positions) + 1)
        if self._budget_s <= 0:
            text, start = (_IN_LINE, None) if old is None else (old.text, old.expected_start)
            return Why(position=position, text=text, expected_start=start)
        began = self._clock.monotonic()
        try:
            why = self._engine.why(lease_id, self._clock.now())
        except KeyError:
            # It is granted, and that is being written.
            return Why(position=position, text=_IN_LINE, expected_start=None)
        self._budget_s -= self._clock.monotonic() - began
        self._fresh.add(lease_id)
        return why

    def _follow(self, old: Place | None, why: Why) -> Place:
        if old is not None and (old.position, old.text) == (why.position, why.text) and _is_close(old, why):
            return old
        return Place(
            position=why.position,
            text=why.text,
            expected_start=why.expected_start,
            version=self._ledger.take_version(),
        )


def _is_close(old: Place, why: Why) -> bool:
    if old.expected_start is None or why.expected_start is None:
        return old.expected_start is why.expected_start
    return abs(old.expected_start - why.expected_start) < _SAME_S
