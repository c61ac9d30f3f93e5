"""Operations on notifications: a user's destinations, their test, and the notifications themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from gpuhub.broker import audit
from gpuhub.broker.db.outbox import MAX_DESTINATIONS, DestinationRow
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.schemas import DestinationChange, DestinationRequest, DestinationView, NotificationView
from gpuhub.common.errors import Conflict, InvalidRequest, NotAllowed, NotFound
from gpuhub.config.notifications import parse_allowed
from gpuhub.domain import notifications
from gpuhub.domain.models import Identity, NotificationRow, new_id
from gpuhub.domain.rate_limit import RateLimit, RateLimiter
from gpuhub.notifications.sender import SendOrder, SendResult
from gpuhub.notifications.services import check_url
from gpuhub.notifications.url_cipher import UrlCipher

#: Each starts a process on the head node, and a test sends a message.
CHECKS = RateLimit(burst=5, per_second=0.05, what="new destinations and tests")


class NotificationOperations:
    """What users do with their destinations."""

    def __init__(
        self, core: BrokerState, cipher: UrlCipher, send: Callable[[SendOrder], Awaitable[SendResult]]
    ) -> None:
        """`send` carries out an order; one without a message only checks the URL."""
        self._core = core
        self._outbox = core.store.outbox
        self._cipher = cipher
        self._send = send
        self._checks = RateLimiter(CHECKS, core.clock.monotonic)

    async def list_destinations(self, caller: Identity) -> list[DestinationView]:
        """Return the caller's destinations, oldest first."""
        owner = self._require_user(caller)
        rows = await asyncio.to_thread(self._outbox.list_destinations, owner)
        return [_view(row, waiting) for row, waiting in rows]

    async def add_destination(self, caller: Identity, request: DestinationRequest) -> DestinationView:
        """Add a destination.

        Raises:
            InvalidRequest: The URL is not one of the permitted kinds, or leads to a private address.
            Conflict: The caller has the most that one user may have.
        """
        owner = self._require_user(caller)
        allowed = self._core.cluster.notifications.allowed_addresses
        label = check_url(request.url, [parse_allowed(text) for text in allowed])
        self._checks.acquire(owner)
        result = await self._send(SendOrder(url=request.url, allowed=allowed))
        if result.outcome != "sent":
            raise InvalidRequest(result.reason)
        row = DestinationRow(
            id=new_id("d"),
            owner=owner,
            name=request.name.strip(),
            label=label,
            url=self._cipher.encrypt(request.url),
            kinds=tuple(dict.fromkeys(request.kinds)),
            created_at=self._core.clock.now(),
        )
        if not await asyncio.to_thread(self._outbox.add_destination, row):
            raise Conflict(f"{MAX_DESTINATIONS} destinations are the limit: remove one first")
        audit.note_reason(f"{row.id}: {label}")
        return _view(row, 0)

    async def change_destination(self, caller: Identity, key: str, change: DestinationChange) -> DestinationView:
        """Choose other notifications for a destination.

        Raises:
            NotFound: The caller has no such destination.
        """
        await self._find(caller, key)
        await asyncio.to_thread(self._outbox.change_destination, key, tuple(dict.fromkeys(change.kinds)))
        return await self._view_current(caller, key)

    async def delete_destination(self, caller: Identity, key: str) -> None:
        """Remove a destination with everything that waits for it.

        Raises:
            NotFound: The caller has no such destination.
        """
        await self._find(caller, key)
        await asyncio.to_thread(self._outbox.delete_destination, key)

    async def test_destination(self, caller: Identity, key: str) -> DestinationView:
        """Queue a test message.

        Raises:
            NotFound: The caller has no such destination.
            TooManyRequests: The caller tests too often.
        """
        row = await self._find(caller, key)
        self._checks.acquire(row.owner)
        now = self._core.clock.now()
        await asyncio.to_thread(self._outbox.add_test, notifications.build_test(key, row.owner, now), key, now)
        return await self._view_current(caller, key)

    async def list_notifications(self, caller: Identity, after: int | None, limit: int) -> list[NotificationView]:
        """Return the caller's notifications after a number, or the newest, oldest first."""
        if not caller.is_user:
            raise NotAllowed("only users have notifications")
        rows = await asyncio.to_thread(self._outbox.list_notifications, caller.name, after, limit)
        return [_view_notification(row) for row in rows]

    async def _find(self, caller: Identity, key: str) -> DestinationRow:
        owner = self._require_user(caller)
        row = await asyncio.to_thread(self._outbox.get_destination, key)
        if row is None or row.owner != owner:
            raise NotFound(f"you have no destination {key!r}")
        return row

    async def _view_current(self, caller: Identity, key: str) -> DestinationView:
        views = await self.list_destinations(caller)
        view = next((view for view in views if view.id == key), None)
        if view is None:
            raise NotFound(f"you have no destination {key!r}")
        return view

    def _require_user(self, caller: Identity) -> str:
        if not caller.is_user:
            raise NotAllowed("only users have destinations")
        if not self._core.cluster.notifications.users:
            raise NotAllowed(
                "an administrator has switched users' notifications off (users = false in [notifications])"
            )
        return caller.name


def _view(row: DestinationRow, waiting: int) -> DestinationView:
    return DestinationView(
        id=row.id,
        name=row.name,
        label=row.label,
        kinds=row.kinds,
        created_at=_time(row.created_at),
        waiting=waiting,
        sent_at=None if row.sent_at is None else _time(row.sent_at),
        failed_at=None if row.failed_at is None else _time(row.failed_at),
        error=row.error,
    )


def _view_notification(row: NotificationRow) -> NotificationView:
    return NotificationView(seq=row.seq, kind=row.kind, at=_time(row.at), title=row.title, body=row.body)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
