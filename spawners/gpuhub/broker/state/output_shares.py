"""Output shares in memory, as the store has them, and who waits for the end of one."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from gpuhub.broker.db.share_store import ShareStore
from gpuhub.common.errors import Conflict
from gpuhub.domain.clock import Clock, wait_event
from gpuhub.domain.models import OutputShareRow

#: Maximum number of users with whom one job or notebook is shared.
MAX_VIEWERS = 16
#: Maximum number of shares of one owner.
MAX_SHARES = 100
#: Maximum wait for an expiry, seconds: the clock may be set.
CLOCK_CHECK_S = 30.0


class OutputShares:
    """All output shares that have not ended."""

    def __init__(self, store: ShareStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._rows = {(row.subject, row.viewer): row for row in store.load()}
        self._changed = asyncio.Event()
        self._writes = asyncio.Lock()
        #: Grows with every change.
        self.version = 0

    def find(self, subject: str, viewer: str) -> OutputShareRow | None:
        """Return the share of a job or notebook with a user, None if there is none or it has expired."""
        row = self._rows.get((subject, viewer))
        return row if row is not None and row.expires_at > self._clock.now() else None

    def select(self, *, owner: str | None = None, viewer: str | None = None) -> list[OutputShareRow]:
        """Return all shares, or those of one owner, or with one viewer; the oldest first."""
        now = self._clock.now()
        return [
            row
            for row in self._rows.values()
            if row.expires_at > now and owner in (None, row.owner) and viewer in (None, row.viewer)
        ]

    def list_of(self, subject: str) -> list[OutputShareRow]:
        """Return the shares of a job or notebook, the oldest first."""
        return [row for row in self.select() if row.subject == subject]

    async def put(self, row: OutputShareRow) -> None:
        """Store a share; one of the same subject and viewer gets the new expiry.

        Raises:
            Conflict: the job, the notebook or the owner has too many.
            Unavailable: the store cannot be written.
        """
        async with self._writes:
            await self._delete_expired()
            key = (row.subject, row.viewer)
            if key not in self._rows:
                self._check_limits(row)
            await asyncio.to_thread(self._store.put, row)
            self._rows[key] = row
            self._report_change()

    async def end(self, rows: Collection[OutputShareRow]) -> None:
        """End shares; open views end at once.

        Raises:
            Unavailable: the store cannot be written; no share has ended.
        """
        if not rows:
            return
        async with self._writes:
            await asyncio.to_thread(self._store.delete, rows)
            for row in rows:
                self._rows.pop((row.subject, row.viewer), None)
            self._report_change()

    async def wait_until_ended(self, subject: str, viewer: str) -> None:
        """Return when the share of a job or notebook with a user has ended or expired."""
        while (row := self.find(subject, viewer)) is not None:
            await wait_event(self._changed, min(max(0.0, row.expires_at - self._clock.now()), CLOCK_CHECK_S))

    def _check_limits(self, row: OutputShareRow) -> None:
        if len(self.list_of(row.subject)) >= MAX_VIEWERS:
            raise Conflict(f"{row.title} is shared with {MAX_VIEWERS} users, which is the limit: end a share first")
        if len(self.select(owner=row.owner)) >= MAX_SHARES:
            raise Conflict(f"{row.owner} has {MAX_SHARES} shares, which is the limit: end one first")

    async def _delete_expired(self) -> None:
        now = self._clock.now()
        expired = [row for row in self._rows.values() if row.expires_at <= now]
        if expired:
            await asyncio.to_thread(self._store.delete, expired)
            for row in expired:
                del self._rows[row.subject, row.viewer]

    def _report_change(self) -> None:
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
