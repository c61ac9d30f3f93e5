"""Notifications in the store: what is reported, where users want it, and the outbox of what is still to be sent.

A notification is stored in the transaction of its event, together with a delivery for each destination. A delivery is
marked before it is sent and again afterwards: one that was being sent when the broker ended is sent a second time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from gpuhub.broker.db import tables
from gpuhub.broker.db.engine import READ_ONLY, Connect
from gpuhub.broker_api.schemas import NotificationKind
from gpuhub.domain.models import EventRow, NotificationRow

#: Maximum number of destinations of one user.
MAX_DESTINATIONS = 5
#: Maximum number of deliveries that wait for one destination; older ones are not sent.
MAX_WAITING = 100
#: Deliveries that are read at once, and rows that are deleted in one transaction.
_BATCH = 400
WAITING, SENDING, SENT, FAILED = "waiting", "sending", "sent", "failed"

_notification, _delivery, _destination = tables.notifications.c, tables.deliveries.c, tables.destinations.c
_LAST = sa.select(sa.func.max(_notification.seq)).where(_notification.subject != "").group_by(_notification.subject)
#: The last notifications about what has a problem.
_OPEN = sa.select(_notification.seq).where(_notification.seq.in_(_LAST), _notification.is_open)


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationRow:
    """A user's destination."""

    id: str
    owner: str
    name: str
    label: str
    #: Encrypted.
    url: str
    kinds: tuple[str, ...]
    created_at: float
    sent_at: float | None = None
    failed_at: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DueDelivery:
    """A delivery that may be sent now."""

    id: int
    destination: str
    owner: str | None
    attempts: int
    is_repeated: bool
    valid_until: float
    notification: NotificationRow


class Outbox:
    """The tables of notifications."""

    def __init__(self, transaction: Connect) -> None:
        """`transaction` opens one of the store's, with its execution options as the argument."""
        self._transaction = transaction
        #: Ids of the destinations of the owner of the machines.
        self.machine_destinations: Sequence[str] = ()

    # -- events ---------------------------------------------------------------------------------------------------

    def add(self, connection: sa.Connection, events: Iterable[EventRow]) -> None:
        """Add the notifications of events, and deliveries to all destinations that want them, within a transaction."""
        rows = {row.key: (event.at, row) for event in events for row in event.notifications}
        if not rows:
            return
        stored = connection.execute(sa.select(_notification.key).where(_notification.key.in_(rows))).scalars().all()
        new = [entry for key, entry in rows.items() if key not in set(stored)]
        owners = {row.owner for _, row in new if row.owner is not None}
        found = connection.execute(
            sa.select(_destination.id, _destination.owner, _destination.kinds).where(_destination.owner.in_(owners))
        ).all()
        for at, row in new:
            wanted = (
                self.machine_destinations
                if row.owner is None
                else [key for key, owner, kinds in found if owner == row.owner and row.kind.value in kinds]
            )
            _insert(connection, row, at, wanted)

    def add_test(self, row: NotificationRow, destination: str, now: float) -> None:
        """Add a notification for one destination alone."""
        with self._transaction() as connection:
            _insert(connection, row, now, [destination])

    def list_notifications(self, owner: str, after: int | None, limit: int) -> list[NotificationRow]:
        """Return the next `limit` notifications of an owner after a number, or the newest ones; oldest first."""
        query = sa.select(tables.notifications).where(_notification.owner == owner).limit(limit)
        query = (
            query.order_by(_notification.seq.desc())
            if after is None
            else query.where(_notification.seq > after).order_by(_notification.seq)
        )
        with self._transaction(READ_ONLY) as connection:
            rows = [_parse(dict(row)) for row in connection.execute(query).mappings()]
        return sorted(rows, key=lambda row: row.seq)

    def find_open_subjects(self) -> set[str]:
        """Return what had a problem at the last notification about it."""
        query = sa.select(_notification.subject).where(_notification.seq.in_(_OPEN))
        with self._transaction(READ_ONLY) as connection:
            return set(connection.execute(query).scalars())

    # -- destinations ---------------------------------------------------------------------------------------------

    def list_destinations(self, owner: str) -> list[tuple[DestinationRow, int]]:
        """Return the destinations of an owner, oldest first, each with the number of deliveries that wait."""
        query = sa.select(tables.destinations).where(_destination.owner == owner).order_by(_destination.created_at)
        unsent = _delivery.state.in_([WAITING, SENDING])
        counts = (
            sa.select(_delivery.destination, sa.func.count())
            .where(unsent, _delivery.owner == owner)
            .group_by(_delivery.destination)
        )
        with self._transaction(READ_ONLY) as connection:
            rows = [_parse_destination(dict(row)) for row in connection.execute(query).mappings()]
            waiting: dict[str, int] = {row[0]: row[1] for row in connection.execute(counts)}
        return [(row, waiting.get(row.id, 0)) for row in rows]

    def get_destination(self, destination: str) -> DestinationRow | None:
        """Return one destination."""
        query = sa.select(tables.destinations).where(_destination.id == destination)
        with self._transaction(READ_ONLY) as connection:
            row = connection.execute(query).mappings().one_or_none()
        return None if row is None else _parse_destination(dict(row))

    def add_destination(self, row: DestinationRow) -> bool:
        """Add a destination; return whether its owner may have one more."""
        with self._transaction() as connection:
            count = sa.select(sa.func.count()).where(_destination.owner == row.owner)
            if connection.execute(count).scalar_one() >= MAX_DESTINATIONS:
                return False
            values = {name: getattr(row, name) for name in DestinationRow.__slots__}
            connection.execute(sa.insert(tables.destinations), [{**values, "kinds": list(row.kinds)}])
        return True

    def change_destination(self, destination: str, kinds: Sequence[str]) -> None:
        """Replace the kinds of notifications of a destination."""
        with self._transaction() as connection:
            query = sa.update(tables.destinations).where(_destination.id == destination)
            connection.execute(query.values(kinds=list(kinds)))

    def delete_destination(self, destination: str) -> None:
        """Delete a destination, and what waits for it."""
        with self._transaction() as connection:
            connection.execute(sa.delete(tables.deliveries).where(_delivery.destination == destination))
            connection.execute(sa.delete(tables.destinations).where(_destination.id == destination))

    # -- deliveries -----------------------------------------------------------------------------------------------

    def recover(self) -> int:
        """Let deliveries wait again that were being sent when the broker ended; return their number."""
        query = sa.update(tables.deliveries).where(_delivery.state == SENDING)
        with self._transaction() as connection:
            return connection.execute(query.values(state=WAITING, is_repeated=True)).rowcount

    def list_due(self, now: float, busy: Collection[str]) -> list[DueDelivery]:
        """Return deliveries that may be sent now, oldest first, without those to `busy` destinations."""
        query = (
            sa.select(tables.notifications, *(column.label(f"_{column.name}") for column in tables.deliveries.c))
            .join(tables.deliveries, _delivery.notification == _notification.seq)
            .where(_delivery.state == WAITING, _delivery.next_at <= now, _delivery.destination.not_in(list(busy)))
            .order_by(_delivery.id)
            .limit(_BATCH)
        )
        with self._transaction(READ_ONLY) as connection:
            return [_parse_due(dict(row)) for row in connection.execute(query).mappings()]

    def claim(self, ids: Sequence[int]) -> None:
        """Note that deliveries are being sent."""
        query = sa.update(tables.deliveries).where(_delivery.id.in_(ids), _delivery.state == WAITING)
        with self._transaction() as connection:
            connection.execute(query.values(state=SENDING, attempts=_delivery.attempts + 1))

    def finish(self, ids: Sequence[int], destination: str, now: float) -> None:
        """Note that deliveries were accepted."""
        with self._transaction() as connection:
            connection.execute(sa.update(tables.deliveries).where(_delivery.id.in_(ids)).values(state=SENT))
            query = sa.update(tables.destinations).where(_destination.id == destination)
            connection.execute(query.values(sent_at=now, failed_at=None, error=None))

    def fail(
        self, ids: Sequence[int], destination: str, now: float, error: str, *, next_at: Mapping[int, float | None]
    ) -> None:
        """Note that deliveries were not accepted, and when each is tried again; None for never."""
        with self._transaction() as connection:
            for number in ids:
                at = next_at[number]
                values: dict[str, Any] = {"state": FAILED} if at is None else {"state": WAITING, "next_at": at}
                connection.execute(sa.update(tables.deliveries).where(_delivery.id == number).values(**values))
            query = sa.update(tables.destinations).where(_destination.id == destination)
            connection.execute(query.values(failed_at=now, error=error))

    def expire(self, now: float) -> int:
        """Give up deliveries that are no longer worth sending; return their number."""
        old = sa.select(_notification.seq).where(_notification.valid_until <= now)
        query = sa.update(tables.deliveries).where(_delivery.state == WAITING, _delivery.notification.in_(old))
        with self._transaction() as connection:
            return connection.execute(query.values(state=FAILED)).rowcount

    def delete_old(self, before: float) -> int:
        """Delete some of the notifications from before a time, with their deliveries; return their number.

        The last one about a problem that is not over stays: after a restart it shows that the problem was reported.
        """
        is_old = (_notification.at < before) & (_notification.valid_until < before)
        oldest = sa.select(_notification.seq).where(is_old, _notification.seq.not_in(_OPEN))
        with self._transaction() as connection:
            seqs = connection.execute(oldest.order_by(_notification.seq).limit(_BATCH)).scalars().all()
            connection.execute(sa.delete(tables.deliveries).where(_delivery.notification.in_(seqs)))
            return connection.execute(sa.delete(tables.notifications).where(_notification.seq.in_(seqs))).rowcount


def _insert(connection: sa.Connection, row: NotificationRow, at: float, destinations: Collection[str]) -> None:
    values = {
        "key": row.key, "kind": row.kind.value, "owner": row.owner, "at": at, "valid_until": at + row.valid_s,
        "title": row.title, "body": row.body, "subject": row.subject, "is_open": row.is_open,
    }  # fmt: skip
    (seq,) = connection.execute(sa.insert(tables.notifications).values(**values)).inserted_primary_key or (0,)
    for destination in destinations:
        delivery = {
            "notification": seq,
            "destination": destination,
            "owner": row.owner,
            "state": WAITING,
            "next_at": at,
        }
        connection.execute(sa.insert(tables.deliveries).values(**delivery))
        # A flood of events must not fill the outbox.
        waits = (_delivery.destination == destination) & (_delivery.state == WAITING)
        surplus = sa.select(_delivery.id).where(waits).order_by(_delivery.id.desc()).limit(1).offset(MAX_WAITING)
        given_up = sa.update(tables.deliveries).where(waits, _delivery.id <= surplus.scalar_subquery())
        connection.execute(given_up.values(state=FAILED))


def _parse(row: Mapping[str, Any]) -> NotificationRow:
    return NotificationRow(
        kind=NotificationKind(row["kind"]),
        key=row["key"],
        title=row["title"],
        body=row["body"],
        owner=row["owner"],
        valid_s=row["valid_until"] - row["at"],
        subject=row["subject"],
        is_open=row["is_open"],
        at=row["at"],
        seq=row["seq"],
    )


def _parse_due(row: Mapping[str, Any]) -> DueDelivery:
    return DueDelivery(
        id=row["_id"],
        destination=row["_destination"],
        owner=row["_owner"],
        attempts=row["_attempts"],
        is_repeated=row["_is_repeated"],
        valid_until=row["valid_until"],
        notification=_parse(row),
    )


def _parse_destination(row: Mapping[str, Any]) -> DestinationRow:
    return DestinationRow(**{**row, "kinds": tuple(row["kinds"])})
