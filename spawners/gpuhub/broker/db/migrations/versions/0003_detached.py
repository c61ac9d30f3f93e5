"""Detached jobs: they outlive their notebook, and are shown after their end.

Columns and an index are added; jobs that are open stay as they are.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From jobs of notebooks to those that stand alone."""
    for column in _new_columns():
        op.add_column("jobs", column)
    op.create_index("ix_jobs_owner_ended_at", "jobs", ["owner", "ended_at"])


def downgrade() -> None:
    """Back, where no job is open that the older version would end.

    Raises:
        RuntimeError: naming what is in use.
    """
    query = "SELECT count(*) FROM jobs WHERE state <> 'ended' AND (detached OR joins IS NOT NULL)"
    if op.get_bind().execute(sa.text(query)).scalar_one():
        raise RuntimeError(
            "the store uses what the older version does not know: a detached job, or one that joins another"
        )
    op.drop_index("ix_jobs_owner_ended_at", "jobs")
    for column in _new_columns():
        op.drop_column("jobs", column.name)


def _new_columns() -> tuple[sa.Column[Any], ...]:
    """A column belongs to one table, so they are created again each time."""
    return (
        sa.Column("detached", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("name", sa.String(80), nullable=False, server_default=""),
        sa.Column("joins", sa.String(64)),
        sa.Column("first_worker", sa.Integer, nullable=False, server_default="0"),
        sa.Column("started_at", sa.Float),
        sa.Column("exit_code", sa.Integer),
    )
