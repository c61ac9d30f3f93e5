"""Servers of jobs are reached through the hub: each job has a port, and the users who may use it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From jobs without a port."""
    op.add_column("jobs", sa.Column("port", sa.Integer))
    op.add_column("jobs", sa.Column("port_users", sa.JSON, nullable=False, server_default="[]"))


def downgrade() -> None:
    """Back; servers of jobs are then out of reach."""
    op.drop_column("jobs", "port_users")
    op.drop_column("jobs", "port")
