"""Who is still there: when somebody last asked for a notebook's lease, or renewed a job."""

from __future__ import annotations

from gpuhub.broker.clock import Clock
from gpuhub.broker.drafts import Snapshot


class Presence:
    """Signs of life of this run of the broker, by lease or job."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started = clock.monotonic()
        self._seen: dict[str, float] = {}

    def note(self, row_id: str) -> None:
        """Somebody is there."""
        self._seen[row_id] = self._clock.monotonic()

    def silent_s(self, row_id: str, created_at: float) -> float:
        """Seconds since the last sign of life, or since it was made; a restart of the broker begins anew."""
        since_seen = self._clock.monotonic() - self._seen.get(row_id, self._started)
        return min(since_seen, self._clock.now() - created_at)

    def forget(self, snapshot: Snapshot) -> None:
        """Drop what has ended."""
        self._seen = {key: at for key, at in self._seen.items() if key in snapshot.leases or key in snapshot.jobs}
