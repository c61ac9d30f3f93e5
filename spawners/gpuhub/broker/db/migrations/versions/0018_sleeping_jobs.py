"""Jobs that sleep until a request to their port."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """No job sleeps."""
    op.add_column("jobs", sa.Column("sleeps", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("jobs", sa.Column("times_asleep", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    """Jobs that are asleep end."""
    op.execute(
        "UPDATE jobs SET state = 'stopping', reason = 'this version knows no jobs that sleep' "
        "WHERE sleeps AND state = 'waiting' AND times_asleep > 0 AND lease_id IN (SELECT id FROM leases WHERE is_held)"
    )
    op.drop_column("jobs", "times_asleep")
    op.drop_column("jobs", "sleeps")
