"""Views of jobs' outputs that owners share with named users."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From a store without shares."""
    op.create_table(
        "output_shares",
        sa.Column("job_id", sa.String(40), primary_key=True),
        sa.Column("viewer", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(80), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
    )


def downgrade() -> None:
    """Back; all shares end."""
    op.drop_table("output_shares")
