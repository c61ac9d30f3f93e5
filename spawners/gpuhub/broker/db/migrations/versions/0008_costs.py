"""What jobs and notebooks use is recorded: one row for each of them, and sums by day that stay."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def _amounts() -> list[sa.Column[object]]:
    """Return the columns that both tables have."""
    return [
        sa.Column("gpu_s", sa.Float, nullable=False),
        sa.Column("measured_s", sa.Float, nullable=False),
        sa.Column("busy_s", sa.Float, nullable=False),
        sa.Column("peak_memory_mib", sa.Integer, nullable=False),
        sa.Column("metered_s", sa.Float, nullable=False),
        sa.Column("energy_j", sa.Float, nullable=False),
        sa.Column("estimated_j", sa.Float, nullable=False),
        sa.Column("amount", sa.Float, nullable=False),
    ]


def upgrade() -> None:
    """From leases whose use is not recorded; those that are open get a record when the broker starts."""
    op.create_table(
        "cost_records",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("groups", sa.JSON, nullable=False),
        sa.Column("purpose", sa.String(16), nullable=False),
        sa.Column("profile", sa.String(64), nullable=False),
        sa.Column("name", sa.String(80), nullable=False),
        sa.Column("model", sa.String(80), nullable=False),
        sa.Column("gpu_count", sa.Integer, nullable=False),
        sa.Column("memory_mib", sa.Integer, nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float),
        *_amounts(),
        sa.Column("currency", sa.String(8), nullable=False),
        sa.Column("advice", sa.Text),
        sa.Column("meters", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_cost_records"),
    )
    op.create_index("ix_cost_records_ended_at", "cost_records", ["ended_at"])
    op.create_index("ix_cost_records_owner_ended_at", "cost_records", ["owner", "ended_at"])
    op.create_table(
        "cost_days",
        sa.Column("day", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("groups", sa.String(1000), nullable=False),
        sa.Column("profile", sa.String(64), nullable=False),
        sa.Column("model", sa.String(80), nullable=False),
        sa.Column("currency", sa.String(8), nullable=False),
        *_amounts(),
        sa.PrimaryKeyConstraint("day", "owner", "groups", "profile", "model", "currency", name="pk_cost_days"),
    )


def downgrade() -> None:
    """Back; what was recorded is lost."""
    op.drop_table("cost_days")
    op.drop_index("ix_cost_records_owner_ended_at", "cost_records")
    op.drop_index("ix_cost_records_ended_at", "cost_records")
    op.drop_table("cost_records")
