"""Faults of GPUs outlive the broker, until the machine is rebooted or an administrator accepts them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From a store without faults."""
    op.create_table(
        "gpu_records",
        sa.Column("gpu_uuid", sa.String(80), nullable=False),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("link_generation", sa.Integer),
        sa.Column("link_width", sa.Integer),
        sa.PrimaryKeyConstraint("gpu_uuid", name="pk_gpu_records"),
    )
    op.create_index("ix_gpu_records_node", "gpu_records", ["node"])
    op.create_table(
        "gpu_faults",
        sa.Column("gpu_uuid", sa.String(80), nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("code", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("occurred_at", sa.Float, nullable=False),
        sa.Column("noticed_at", sa.Float, nullable=False),
        sa.Column("boot_id", sa.String(64)),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("accepted_by", sa.String(64)),
        sa.PrimaryKeyConstraint("gpu_uuid", "kind", "code", name="pk_gpu_faults"),
        sa.ForeignKeyConstraint(["gpu_uuid"], ["gpu_records.gpu_uuid"], name="fk_gpu_faults_gpu_uuid"),
    )


def downgrade() -> None:
    """Back; GPUs with faults are then granted again."""
    op.drop_table("gpu_faults")
    op.drop_index("ix_gpu_records_node", "gpu_records")
    op.drop_table("gpu_records")
