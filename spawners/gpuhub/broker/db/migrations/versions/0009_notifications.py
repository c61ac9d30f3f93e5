"""Notifications, users' destinations, and the outbox."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From a store without notifications."""
    op.create_table(
        "notifications",
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("key", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(24), nullable=False),
        sa.Column("owner", sa.String(64)),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("valid_until", sa.Float, nullable=False),
        sa.Column("title", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("subject", sa.String(160), nullable=False, server_default=""),
        sa.Column("is_open", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.UniqueConstraint("key", name="uq_notifications_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_notifications_owner_seq", "notifications", ["owner", "seq"])
    op.create_index("ix_notifications_subject", "notifications", ["subject"])
    op.create_table(
        "destinations",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("name", sa.String(60), nullable=False),
        sa.Column("label", sa.String(120), nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("kinds", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("sent_at", sa.Float),
        sa.Column("failed_at", sa.Float),
        sa.Column("error", sa.Text),
    )
    op.create_index("ix_destinations_owner", "destinations", ["owner"])
    op.create_table(
        "deliveries",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("notification", sa.Integer, sa.ForeignKey("notifications.seq"), nullable=False),
        sa.Column("destination", sa.String(40), nullable=False),
        sa.Column("owner", sa.String(64)),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("next_at", sa.Float, nullable=False),
        sa.Column("is_repeated", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.UniqueConstraint("notification", "destination"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_deliveries_destination", "deliveries", ["destination"])
    op.create_index("ix_deliveries_state_next_at", "deliveries", ["state", "next_at"])


def downgrade() -> None:
    """Back; destinations and what was not sent yet are lost."""
    op.drop_table("deliveries")
    op.drop_table("destinations")
    op.drop_table("notifications")
