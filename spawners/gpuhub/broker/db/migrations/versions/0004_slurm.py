"""Slurm as the engine: each lease may have a Slurm job that stands for it. A column is added."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From leases that gpuhub alone decides about to those that Slurm may."""
    op.add_column("leases", sa.Column("slurm_job", sa.BigInteger))


def downgrade() -> None:
    """Back, where no open lease has a Slurm job: the older version would give its GPUs without asking Slurm.

    Raises:
        RuntimeError: naming what is in use.
    """
    query = "SELECT count(*) FROM leases WHERE state <> 'released' AND slurm_job IS NOT NULL"
    if op.get_bind().execute(sa.text(query)).scalar_one():
        raise RuntimeError("the store uses what the older version does not know: a lease that is a Slurm job")
    op.drop_column("leases", "slurm_job")
