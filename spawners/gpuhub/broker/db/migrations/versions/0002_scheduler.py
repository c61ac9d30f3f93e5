"""The scheduler: parts of GPUs, groups, arrays, preemption, quarantine, cordons, reservations, events.

Columns are added and indexes made, no table is copied: leases that are open stay as they are. What is held at the
moment of the upgrade is written into `held_gpus`.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_OLD_ASK = ("nodes", "gpus_per_node", "least_memory_mib", "exclude")


def upgrade() -> None:
    """From first come, first served to the scheduler."""
    for table, columns in _new_columns().items():
        for column in columns:
            op.add_column(table, column)
    op.execute("UPDATE jobs SET min_nnodes = nnodes")
    op.execute("UPDATE leases SET state = 'requested' WHERE state = 'waiting'")
    # Keys could come twice before; the newest lease keeps its own.
    op.execute(
        "UPDATE leases SET key = 'old:' || id WHERE EXISTS "
        "(SELECT 1 FROM leases AS newer WHERE newer.owner = leases.owner AND newer.key = leases.key "
        "AND newer.seq > leases.seq)"
    )
    op.create_index("ux_leases_owner_key", "leases", ["owner", "key"], unique=True)
    op.create_index("ix_lease_gpus_released_at", "lease_gpus", ["released_at"])
    _create_held()
    op.drop_index("ux_lease_gpus_held", "lease_gpus")
    _create_operations()


def downgrade() -> None:
    """Back, where nothing is in use that the older version does not know.

    Raises:
        RuntimeError: naming what is in use.
    """
    _refuse_what_is_new()
    connection = op.get_bind()
    for lease_id, ask in connection.execute(sa.text("SELECT id, ask FROM leases")).all():
        old = json.dumps(_old_ask(json.loads(ask) if isinstance(ask, str) else ask))
        connection.execute(sa.text("UPDATE leases SET ask = :ask WHERE id = :id"), {"ask": old, "id": lease_id})
    op.execute("UPDATE leases SET state = 'waiting' WHERE state = 'requested'")
    op.execute("UPDATE leases SET state = 'releasing' WHERE state = 'quarantined'")
    for table in ("events", "reservations", "cordons", "held_gpus", "gpu_modes"):
        op.drop_table(table)
    op.drop_index("ux_leases_owner_key", "leases")
    op.drop_index("ix_lease_gpus_released_at", "lease_gpus")
    op.create_index(
        "ux_lease_gpus_held",
        "lease_gpus",
        ["gpu_uuid"],
        unique=True,
        sqlite_where=sa.text("released_at IS NULL"),
        postgresql_where=sa.text("released_at IS NULL"),
    )
    for table, columns in _new_columns().items():
        for column in columns:
            op.drop_column(table, column.name)


def _new_columns() -> dict[str, tuple[sa.Column[Any], ...]]:
    """By table. A column belongs to one table, so they are created again each time."""
    return {
        "leases": (
            sa.Column("groups", sa.JSON, nullable=False, server_default="[]"),
            sa.Column("note", sa.Text),
            sa.Column("quarantined_at", sa.Float),
            sa.Column("identities", sa.JSON, nullable=False, server_default="{}"),
        ),
        "lease_gpus": (
            sa.Column("share", sa.Integer, nullable=False, server_default="1"),
            sa.Column("part", sa.Integer, nullable=False, server_default="0"),
            sa.Column("shed_at", sa.Float),
        ),
        "jobs": (
            sa.Column("min_nnodes", sa.Integer, nullable=False, server_default="1"),
            sa.Column("gpus", sa.Integer),
            sa.Column("array", sa.String(64)),
            sa.Column("preemptions", sa.Integer, nullable=False, server_default="0"),
            sa.Column("checkpoint_until", sa.Float),
        ),
        "gpus": (
            sa.Column("capability", sa.String(8)),
            sa.Column("is_mig", sa.Boolean, nullable=False, server_default=sa.false()),
        ),
    }


def _create_held() -> None:
    op.create_table(
        "gpu_modes",
        sa.Column("gpu_uuid", sa.String(80), nullable=False),
        sa.Column("share", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("gpu_uuid", name="pk_gpu_modes"),
        sa.UniqueConstraint("gpu_uuid", "share", name="uq_gpu_modes_gpu_uuid_share"),
    )
    op.create_table(
        "held_gpus",
        sa.Column("gpu_uuid", sa.String(80), nullable=False),
        sa.Column("part", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("share", sa.Integer, nullable=False),
        sa.Column("lease_id", sa.String(40), nullable=False),
        sa.PrimaryKeyConstraint("gpu_uuid", "part", name="pk_held_gpus"),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.id"], name="fk_held_gpus_lease_id"),
        sa.ForeignKeyConstraint(
            ["gpu_uuid", "share"], ["gpu_modes.gpu_uuid", "gpu_modes.share"], name="fk_held_gpus_gpu_uuid_share"
        ),
        sa.CheckConstraint("part >= 0 AND part < share", name="part"),
    )
    op.execute("INSERT INTO gpu_modes (gpu_uuid, share) SELECT gpu_uuid, 1 FROM lease_gpus WHERE released_at IS NULL")
    op.execute(
        "INSERT INTO held_gpus (gpu_uuid, part, share, lease_id) "
        "SELECT gpu_uuid, 0, 1, lease_id FROM lease_gpus WHERE released_at IS NULL"
    )


def _create_operations() -> None:
    op.create_table(
        "cordons",
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("by", sa.String(64), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("grace_s", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("node", name="pk_cordons"),
    )
    op.create_table(
        "reservations",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("nodes", sa.JSON, nullable=False),
        sa.Column("gpus", sa.JSON, nullable=False),
        sa.Column("users", sa.JSON, nullable=False),
        sa.Column("groups", sa.JSON, nullable=False),
        sa.Column("starts_at", sa.Float, nullable=False),
        sa.Column("ends_at", sa.Float, nullable=False),
        sa.Column("created_by", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_reservations"),
    )
    op.create_table(
        "events",
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("owner", sa.String(64)),
        sa.Column("lease", sa.String(40)),
        sa.Column("job", sa.String(40)),
        sa.Column("node", sa.String(64)),
        sa.PrimaryKeyConstraint("seq", name="pk_events"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_owner", "events", ["owner"])


def _old_ask(ask: dict[str, Any]) -> dict[str, Any]:
    """Return what the older version reads; new demands of an ended lease are dropped."""
    models = ask.get("models") or ([ask["model"]] if ask.get("model") else [])
    defaults = {"nodes": 1, "gpus_per_node": 1, "least_memory_mib": 0, "exclude": []}
    return {name: ask.get(name, defaults[name]) for name in _OLD_ASK} | {"model": models[0] if models else None}


def _refuse_what_is_new() -> None:
    connection = op.get_bind()
    open_asks = connection.execute(sa.text("SELECT ask FROM leases WHERE state <> 'released'")).scalars().all()
    asks = [json.loads(ask) if isinstance(ask, str) else ask for ask in open_asks]
    known = {*_OLD_ASK, "model", "models", "cpu_milli", "memory_mib"}
    in_use = {
        "a part of a GPU, a spread, or another new demand": any(
            set(ask) - known or len(ask.get("models") or ()) > 1 for ask in asks
        ),
        "a reservation": connection.execute(sa.text("SELECT count(*) FROM reservations")).scalar_one() > 0,
        "a cordon": connection.execute(sa.text("SELECT count(*) FROM cordons")).scalar_one() > 0,
        "a preempted job": connection.execute(
            sa.text("SELECT count(*) FROM jobs WHERE state = 'preempting'")
        ).scalar_one()
        > 0,
    }
    found = [what for what, is_used in in_use.items() if is_used]
    if found:
        raise RuntimeError(f"the store uses what the older version does not know: {', '.join(found)}")
