"""Owners keep idle notebooks: each lease has since when and until when."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From leases that nobody keeps."""
    op.add_column("leases", sa.Column("kept_from", sa.Float))
    op.add_column("leases", sa.Column("kept_until", sa.Float))


def downgrade() -> None:
    """Back; idle notebooks are then not stopped at all."""
    op.drop_column("leases", "kept_until")
    op.drop_column("leases", "kept_from")
