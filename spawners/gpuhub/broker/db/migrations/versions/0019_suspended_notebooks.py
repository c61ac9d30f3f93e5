"""Notebooks that are suspended: their GPU memory is in host memory, and others may have their GPU."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """No notebook is suspended."""
    op.add_column("leases", sa.Column("suspension", sa.JSON))
    op.add_column("leases", sa.Column("held_from", sa.Float))


def downgrade() -> None:
    """Notebooks that are suspended end: the version before would grant their GPUs to others for ever."""
    op.execute(
        "UPDATE leases SET state = 'releasing', reason = 'this version knows no suspended notebooks' "
        "WHERE suspension IS NOT NULL AND state = 'active' "
        "AND EXISTS (SELECT 1 FROM held_gpus WHERE held_gpus.lease_id = leases.id)"
    )
    # Nothing is held that would need proof; containers of released leases are removed.
    op.execute(
        "UPDATE leases SET state = 'released', released_at = since, "
        "reason = 'this version knows no suspended notebooks' "
        "WHERE suspension IS NOT NULL AND state IN ('active', 'releasing', 'quarantined') "
        "AND NOT EXISTS (SELECT 1 FROM held_gpus WHERE held_gpus.lease_id = leases.id)"
    )
    op.drop_column("leases", "held_from")
    op.drop_column("leases", "suspension")
