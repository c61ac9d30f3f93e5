"""Shares of saved notebooks beside those of jobs' outputs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From shares of jobs alone: `path` is empty for them."""
    op.alter_column("output_shares", "job_id", new_column_name="subject")
    op.add_column("output_shares", sa.Column("path", sa.String(1024), nullable=False, server_default=""))


def downgrade() -> None:
    """Back; shares of notebooks end."""
    op.execute("DELETE FROM output_shares WHERE path <> ''")
    op.drop_column("output_shares", "path")
    op.alter_column("output_shares", "subject", new_column_name="job_id")
