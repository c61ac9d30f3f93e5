"""Jobs wait for other jobs: `--after`, a limit of an array's running tasks, and retries after failures."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_JOB_COLUMNS = ("array_limit", "after", "max_retries", "retries", "has_failed")


def upgrade() -> None:
    """From jobs that all are in the queue."""
    op.add_column("leases", sa.Column("is_held", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("jobs", sa.Column("array_limit", sa.Integer))
    op.add_column("jobs", sa.Column("after", sa.String(64)))
    op.add_column("jobs", sa.Column("max_retries", sa.Integer, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("retries", sa.Integer, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("has_failed", sa.Boolean, nullable=False, server_default=sa.false()))


def downgrade() -> None:
    """Back; jobs that wait for others are in the queue then."""
    for name in _JOB_COLUMNS:
        op.drop_column("jobs", name)
    op.drop_column("leases", "is_held")
