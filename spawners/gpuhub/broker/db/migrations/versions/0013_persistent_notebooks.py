"""Notebooks that ask again for their GPUs when their container was lost: whether, with which image, and when it was."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From notebooks that end with their container."""
    op.add_column("leases", sa.Column("is_persistent", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("leases", sa.Column("image", sa.String(255)))
    op.add_column("leases", sa.Column("losses", sa.JSON, nullable=False, server_default="[]"))


def downgrade() -> None:
    """Back; notebooks then end with their container."""
    op.drop_column("leases", "losses")
    op.drop_column("leases", "image")
    op.drop_column("leases", "is_persistent")
