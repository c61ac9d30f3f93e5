"""Ended leases are deleted after a time; their GPU time by day and each owner's last end on a node remain.

Two tables are added, and indexes by which old rows are found.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_INDEXES = (
    ("ix_leases_released_at", "leases", ["released_at"]),
    ("ix_jobs_ended_at", "jobs", ["ended_at"]),
    ("ix_jobs_lease_id", "jobs", ["lease_id"]),
)


def upgrade() -> None:
    """From leases that stay to those that are deleted."""
    op.create_table(
        "usage_days",
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("day", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("model", sa.String(80), nullable=False),
        sa.Column("memory_mib", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("gpu_s", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("owner", "day", "model", "memory_mib", name="pk_usage_days"),
    )
    op.create_table(
        "lease_ends",
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("owner", "node", name="pk_lease_ends"),
    )
    for name, table, columns in _INDEXES:
        op.create_index(name, table, columns)
    op.drop_index("ix_events_owner", "events")
    op.create_index("ix_events_owner_seq", "events", ["owner", "seq"])


def downgrade() -> None:
    """Back; fair share then counts what is left of the leases."""
    op.drop_index("ix_events_owner_seq", "events")
    op.create_index("ix_events_owner", "events", ["owner"])
    for name, table, _ in _INDEXES:
        op.drop_index(name, table)
    op.drop_table("lease_ends")
    op.drop_table("usage_days")
