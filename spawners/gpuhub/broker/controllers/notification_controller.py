"""The controller of notifications: it notices what only time causes, and sends what is in the outbox.

All that waits for one destination is sent as one message. A destination gets one message at a time, and few users use
few processes at a time, so that a slow destination delays itself alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence

from gpuhub.broker.controllers.loop import run_step
from gpuhub.broker.db.outbox import DueDelivery
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.schemas import NotificationKind
from gpuhub.common.errors import GpuhubError
from gpuhub.common.tasks import cancel_tasks
from gpuhub.domain import lease_states, notifications
from gpuhub.notifications.sender import OutgoingMessage, SendOrder, SendResult
from gpuhub.notifications.url_cipher import UrlCipher

log = logging.getLogger(__name__)

#: Interval of the checks, seconds.
CHECK_PERIOD_S = 1.0
#: Minimum time between two messages to one destination, seconds.
MESSAGE_PERIOD_S = 20.0
#: Maximum number of processes that send at the same time.
MAX_PROCESSES = 8
#: Maximum number of those that send for one user.
MAX_OWNER_PROCESSES = 2
#: Time that messages which are being sent get when the broker ends, seconds.
CLOSE_S = 4.0

Send = Callable[[SendOrder], Awaitable[SendResult]]


class NotificationController:
    """Fills and empties the outbox, until cancelled."""

    def __init__(
        self,
        *,
        core: BrokerState,
        send: Send,
        cipher: UrlCipher,
        machine_urls: Mapping[str, str],
        message_period_s: float = MESSAGE_PERIOD_S,
    ) -> None:
        """Create the controller.

        Args:
            send: Sends one message.
            machine_urls: The destinations of the owner of the machines, by id.
            message_period_s: Least time between two messages to one destination, seconds.
        """
        self._core = core
        self._outbox = core.store.outbox
        self._send = send
        self._cipher = cipher
        self._machine_urls = machine_urls
        self._message_period_s = message_period_s
        self._sending: dict[str, tuple[str | None, asyncio.Task[None]]] = {}
        #: When each destination got its last message, monotonic seconds.
        self._sent_at: dict[str, float] = {}
        #: Leases of which it was reported that they end soon, with the end.
        self._reported_ends: dict[str, float] = {}
        #: False while the store may have deliveries as being sent that are not.
        self._is_recovered = False

    async def run(self) -> None:
        while True:
            await run_step("notifications", self.check)
            await asyncio.sleep(CHECK_PERIOD_S)

    async def close(self) -> None:
        """Let messages that are being sent finish for a moment; what remains is sent again by the next broker."""
        tasks = [task for _, task in self._sending.values()]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
        await cancel_tasks(late)

    async def check(self) -> None:
        """Report leases that end soon, and start to send what is due."""
        if not self._is_recovered and not self._sending:
            # Whether these were sent is not known.
            again = await asyncio.to_thread(self._outbox.recover)
            if again:
                log.info("%d notifications are sent again: they were being sent, and their result is not known", again)
            self._is_recovered = True
        self._report_ends()
        now = self._core.clock.now()
        due = await asyncio.to_thread(self._outbox.list_due, now, self._find_busy())
        if any(delivery.valid_until <= now for delivery in due):
            await asyncio.to_thread(self._outbox.expire, now)
            due = [delivery for delivery in due if delivery.valid_until > now]
        by_destination: defaultdict[str, list[DueDelivery]] = defaultdict(list)
        for delivery in due:
            by_destination[delivery.destination].append(delivery)
        for destination, deliveries in by_destination.items():
            if self._has_room(deliveries[0].owner):
                task = asyncio.ensure_future(self._deliver(destination, deliveries))
                self._sending[destination] = deliveries[0].owner, task

    def _find_busy(self) -> set[str]:
        """Return the destinations that get a message, or got one a moment ago."""
        since = self._core.clock.monotonic() - self._message_period_s
        self._sent_at = {key: at for key, at in self._sent_at.items() if at > since}
        return self._sending.keys() | self._sent_at.keys()

    def _has_room(self, owner: str | None) -> bool:
        counts = Counter(used_by for used_by, _ in self._sending.values())
        # The owner of the machines does not wait for users.
        return owner is None or (counts[owner] < MAX_OWNER_PROCESSES and counts.total() - counts[None] < MAX_PROCESSES)

    def _report_ends(self) -> None:
        core, now = self._core, self._core.clock.now()
        leases = core.ledger.snapshot.leases
        for lease in leases.values():
            ends_at = lease.expires_at
            if ends_at is None or lease.state not in lease_states.LIVE or self._reported_ends.get(lease.id) == ends_at:
                continue
            if notifications.has_little_time(lease, now):
                self._reported_ends[lease.id] = ends_at
                row = notifications.build_time_left(lease, ends_at - now)
                core.add_event(
                    "lease.expiring",
                    f"{lease.purpose} lease of {lease.owner}: {row.title}",
                    owner=lease.owner,
                    lease=lease.id,
                    notifications=[row],
                )
        self._reported_ends = {key: at for key, at in self._reported_ends.items() if key in leases}

    async def _deliver(self, destination: str, deliveries: Sequence[DueDelivery]) -> None:
        try:
            await self._send_message(destination, deliveries)
        except GpuhubError as error:
            log.warning("the result of a notification was not stored: %s", error)
            self._is_recovered = False
        except Exception:
            log.exception("a notification failed unexpectedly")
            self._is_recovered = False
        finally:
            self._sending.pop(destination, None)

    async def _send_message(self, destination: str, deliveries: Sequence[DueDelivery]) -> None:
        ids = [delivery.id for delivery in deliveries]
        await asyncio.to_thread(self._outbox.claim, ids)
        self._sent_at[destination] = self._core.clock.monotonic()
        result = await self._try_to_send(destination, deliveries)
        now = self._core.clock.now()
        if result.outcome == "sent":
            await asyncio.to_thread(self._outbox.finish, ids, destination, now)
            return
        who = deliveries[0].owner or "the owner of the machines"
        log.info("a notification of %s was not accepted: %s", who, result.reason)
        next_at = {delivery.id: _find_next_attempt(delivery, result, now) for delivery in deliveries}
        await asyncio.to_thread(self._outbox.fail, ids, destination, now, result.reason, next_at=next_at)

    async def _try_to_send(self, destination: str, deliveries: Sequence[DueDelivery]) -> SendResult:
        allowed: tuple[str, ...] | None = None
        url = self._machine_urls.get(destination)
        if url is None:
            row = await asyncio.to_thread(self._outbox.get_destination, destination)
            if row is None:
                return SendResult(outcome="invalid", reason="the destination was removed")
            if not self._core.cluster.notifications.users:
                return SendResult(outcome="refused", reason="an administrator has switched users' notifications off")
            try:
                url = self._cipher.decrypt(row.url)
            except GpuhubError as error:
                return SendResult(outcome="invalid", reason=str(error))
            allowed = self._core.cluster.notifications.allowed_addresses
        message = notifications.combine(
            [delivery.notification for delivery in deliveries],
            is_repeated=any(delivery.is_repeated for delivery in deliveries),
        )
        return await self._send(
            SendOrder(url=url, allowed=allowed, message=OutgoingMessage(title=message.title, body=message.body))
        )


def _find_next_attempt(delivery: DueDelivery, result: SendResult, now: float) -> float | None:
    """Return when a delivery is tried again; None for never."""
    if result.outcome != "failed" or delivery.notification.kind is NotificationKind.TEST:
        return None
    at = now + notifications.choose_pause(delivery.attempts + 1)
    return at if at < delivery.valid_until else None
