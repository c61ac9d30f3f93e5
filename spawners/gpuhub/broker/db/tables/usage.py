"""Tables of what owners may use, have used, and what it cost."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Column, Float, Index, Integer, String, Table, Text

from gpuhub.broker.db.tables.metadata import metadata

#: Limits that administrators set for single users; NULL where cluster.toml decides.
user_limits = Table(
    "user_limits",
    metadata,
    Column("owner", String(64), primary_key=True),
    Column("max_gpus", Integer),
    Column("gpu_hours_per_week", Float),
    Column("max_waiting", Integer),
    Column("max_jobs", Integer),
    Column("longest_lease_s", Float),
    Column("reason", Text, nullable=False, server_default=""),
    Column("by", String(64), nullable=False),
    Column("at", Float, nullable=False),
)

#: GPU time of deleted leases: of each owner by day (since 1970, UTC) and by card, in seconds of a whole GPU.
usage_days = Table(
    "usage_days",
    metadata,
    Column("owner", String(64), primary_key=True),
    Column("day", Integer, primary_key=True, autoincrement=False),
    Column("model", String(80), primary_key=True),
    Column("memory_mib", Integer, primary_key=True, autoincrement=False),
    Column("gpu_s", Float, nullable=False),
)

#: When the last deleted lease of each owner on each node ended.
lease_ends = Table(
    "lease_ends",
    metadata,
    Column("owner", String(64), primary_key=True),
    Column("node", String(64), primary_key=True),
    Column("at", Float, nullable=False),
)


def _build_amounts() -> list[Column[Any]]:
    """Return the columns of what was used, which records and days have."""
    return [
        Column("gpu_s", Float, nullable=False),
        Column("measured_s", Float, nullable=False),
        Column("busy_s", Float, nullable=False),
        Column("peak_memory_mib", Integer, nullable=False),
        Column("metered_s", Float, nullable=False),
        Column("energy_j", Float, nullable=False),
        Column("estimated_j", Float, nullable=False),
        Column("amount", Float, nullable=False),
    ]


#: What each job, and the lease of each notebook, has used and cost; deleted some time after its end.
cost_records = Table(
    "cost_records",
    metadata,
    #: Id of the job, or of the notebook's lease.
    Column("id", String(40), primary_key=True),
    Column("owner", String(64), nullable=False),
    Column("groups", JSON, nullable=False),
    Column("purpose", String(16), nullable=False),
    Column("profile", String(64), nullable=False),
    Column("name", String(80), nullable=False),
    Column("model", String(80), nullable=False),
    Column("gpu_count", Integer, nullable=False),
    Column("memory_mib", Integer, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float, index=True),
    *_build_amounts(),
    Column("currency", String(8), nullable=False),
    Column("advice", Text),
    #: What is needed to continue after a restart: the GPUs that it holds.
    Column("meters", JSON, nullable=False),
)
Index("ix_cost_records_owner_ended_at", cost_records.c.owner, cost_records.c.ended_at)

#: What was used and cost by day (since 1970, UTC), which stays after leases and jobs were deleted.
cost_days = Table(
    "cost_days",
    metadata,
    Column("day", Integer, primary_key=True, autoincrement=False),
    Column("owner", String(64), primary_key=True),
    #: A JSON list of names, in alphabetical order.
    Column("groups", String(1000), primary_key=True),
    #: Empty for jobs.
    Column("profile", String(64), primary_key=True),
    Column("model", String(80), primary_key=True),
    Column("currency", String(8), primary_key=True),
    *_build_amounts(),
)
