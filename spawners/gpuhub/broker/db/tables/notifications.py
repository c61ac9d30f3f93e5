"""Tables of events and notifications."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
)

from gpuhub.broker.db.tables.metadata import metadata

#: The newest events of each owner.
events = Table(
    "events",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("text", Text, nullable=False),
    Column("owner", String(64)),
    Column("lease", String(40)),
    Column("job", String(40)),
    Column("node", String(64)),
    # A number is never used twice, even after the newest events were deleted.
    sqlite_autoincrement=True,
)
Index("ix_events_owner_seq", events.c.owner, events.c.seq)

#: Notifications of each owner, and of the owner of the machines (`owner` null).
notifications = Table(
    "notifications",
    metadata,
    Column("seq", Integer, primary_key=True),
    #: Identifies the event, which makes one notification, even if it is reported again after a restart.
    Column("key", String(200), nullable=False, unique=True),
    Column("kind", String(24), nullable=False),
    Column("owner", String(64)),
    Column("at", Float, nullable=False),
    Column("valid_until", Float, nullable=False),
    Column("title", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("subject", String(160), nullable=False, server_default=""),
    Column("is_open", Boolean, nullable=False, server_default=false()),
    sqlite_autoincrement=True,
)
Index("ix_notifications_owner_seq", notifications.c.owner, notifications.c.seq)
Index("ix_notifications_subject", notifications.c.subject)

#: Destinations of users' notifications; `url` is encrypted.
destinations = Table(
    "destinations",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("owner", String(64), nullable=False, index=True),
    Column("name", String(60), nullable=False),
    Column("label", String(120), nullable=False),
    Column("url", Text, nullable=False),
    Column("kinds", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("sent_at", Float),
    Column("failed_at", Float),
    Column("error", Text),
)

#: The outbox: one notification for one destination.
deliveries = Table(
    "deliveries",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("notification", Integer, ForeignKey("notifications.seq"), nullable=False),
    #: Id of a destination, or `file:` and a keyed hash of a line of the file of the owner of the machines.
    Column("destination", String(40), nullable=False, index=True),
    Column("owner", String(64)),
    #: `waiting`, `sending`, `sent` or `failed`.
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("next_at", Float, nullable=False),
    #: The broker ended while it was being sent.
    Column("is_repeated", Boolean, nullable=False, server_default=false()),
    UniqueConstraint("notification", "destination"),
    sqlite_autoincrement=True,
)
Index("ix_deliveries_state_next_at", deliveries.c.state, deliveries.c.next_at)
