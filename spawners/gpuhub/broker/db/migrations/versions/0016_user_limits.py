"""Limits that administrators set for single users, in place of those of cluster.toml."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From limits in cluster.toml alone."""
    op.create_table(
        "user_limits",
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("max_gpus", sa.Integer),
        sa.Column("gpu_hours_per_week", sa.Float),
        sa.Column("max_waiting", sa.Integer),
        sa.Column("max_jobs", sa.Integer),
        sa.Column("longest_lease_s", sa.Float),
        sa.Column("reason", sa.Text, nullable=False, server_default=""),
        sa.Column("by", sa.String(64), nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("owner", name="pk_user_limits"),
    )


def downgrade() -> None:
    """Back; limits of cluster.toml count again for all."""
    op.drop_table("user_limits")
