"""Nodes that sleep: whether each is on, asleep or on its way, how long it takes to wake, and what failed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From nodes that stay on."""
    op.create_table(
        "node_power",
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("changed_at", sa.Float, nullable=False),
        sa.Column("wake_times_s", sa.JSON, nullable=False, server_default="[]"),
        sa.Column("retry_at", sa.Float),
        sa.Column("error", sa.Text),
        sa.PrimaryKeyConstraint("node", name="pk_node_power"),
    )


def downgrade() -> None:
    """Back; nodes that sleep then count as down until they are switched on."""
    op.drop_table("node_power")
