"""Leases, their GPUs, jobs, workers and GPUs as last seen."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    _create_leases()
    _create_jobs()
    op.create_table(
        "gpus",
        sa.Column("uuid", sa.String(80), nullable=False),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("index", sa.Integer, nullable=False),
        sa.Column("model", sa.String(80), nullable=False),
        sa.Column("memory_mib", sa.Integer, nullable=False),
        sa.Column("seen_at", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("uuid", name="pk_gpus"),
    )
    op.create_index("ix_gpus_node", "gpus", ["node"])


def downgrade() -> None:
    """Remove the tables."""
    for table in ("gpus", "workers", "jobs", "lease_gpus", "leases"):
        op.drop_table(table)


def _create_leases() -> None:
    op.create_table(
        "leases",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("key", sa.String(128), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("purpose", sa.String(16), nullable=False),
        sa.Column("subject", sa.String(64), nullable=False),
        sa.Column("profile", sa.String(64)),
        sa.Column("ask", sa.JSON, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("since", sa.Float, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("time_limit_s", sa.Integer),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("granted_at", sa.Float),
        sa.Column("expires_at", sa.Float),
        sa.Column("released_at", sa.Float),
        sa.Column("reason", sa.Text),
        sa.Column("container_id", sa.String(64)),
        sa.Column("nodes", sa.JSON, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_leases"),
        sa.UniqueConstraint("seq", name="uq_leases_seq"),
    )
    op.create_index("ix_leases_state", "leases", ["state"])
    op.create_table(
        "lease_gpus",
        sa.Column("lease_id", sa.String(40), nullable=False),
        sa.Column("gpu_uuid", sa.String(80), nullable=False),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("index", sa.Integer, nullable=False),
        sa.Column("model", sa.String(80), nullable=False),
        sa.Column("memory_mib", sa.Integer, nullable=False),
        sa.Column("worker", sa.Integer, nullable=False),
        sa.Column("released_at", sa.Float),
        sa.PrimaryKeyConstraint("lease_id", "gpu_uuid", name="pk_lease_gpus"),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.id"], name="fk_lease_gpus_lease_id"),
    )
    op.create_index(
        "ux_lease_gpus_held",
        "lease_gpus",
        ["gpu_uuid"],
        unique=True,
        sqlite_where=sa.text("released_at IS NULL"),
        postgresql_where=sa.text("released_at IS NULL"),
    )


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("server", sa.String(64), nullable=False),
        sa.Column("notebook_lease", sa.String(40)),
        sa.Column("lease_id", sa.String(40), nullable=False),
        sa.Column("image", sa.String(255), nullable=False),
        sa.Column("nnodes", sa.Integer, nullable=False),
        sa.Column("nproc_per_node", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("since", sa.Float, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float),
        sa.Column("reason", sa.Text),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.id"], name="fk_jobs_lease_id"),
        sa.UniqueConstraint("owner", "run_id", name="uq_jobs_owner_run_id"),
    )
    op.create_index("ix_jobs_state", "jobs", ["state"])
    op.create_table(
        "workers",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("index", sa.Integer, nullable=False),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("container_id", sa.String(64)),
        sa.Column("exit_code", sa.Integer),
        sa.Column("message", sa.Text),
        sa.PrimaryKeyConstraint("job_id", "index", name="pk_workers"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_workers_job_id"),
    )
