"""CPU and memory of a lease's containers follow its GPUs: each lease has what it was granted on each node."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From leases whose containers have the sizes that their requests name."""
    op.add_column("leases", sa.Column("sizes", sa.JSON, nullable=False, server_default="{}"))


def downgrade() -> None:
    """Back; running containers keep their limits."""
    op.drop_column("leases", "sizes")
