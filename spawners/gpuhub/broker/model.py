"""The broker's tables. Changing them needs a migration beside (`migrations/versions`)."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

leases = Table(
    "leases",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("seq", Integer, nullable=False, unique=True),
    Column("key", String(128), nullable=False),
    Column("owner", String(64), nullable=False),
    Column("purpose", String(16), nullable=False),
    Column("subject", String(64), nullable=False),
    Column("profile", String(64)),
    Column("ask", JSON, nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("since", Float, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("time_limit_s", Integer),
    Column("created_at", Float, nullable=False),
    Column("granted_at", Float),
    Column("expires_at", Float),
    Column("released_at", Float),
    Column("reason", Text),
    Column("container_id", String(64)),
    Column("nodes", JSON, nullable=False),
    Column("version", BigInteger, nullable=False),
)

lease_gpus = Table(
    "lease_gpus",
    metadata,
    Column("lease_id", String(40), ForeignKey("leases.id"), primary_key=True),
    Column("gpu_uuid", String(80), primary_key=True),
    Column("node", String(64), nullable=False),
    Column("index", Integer, nullable=False),
    Column("model", String(80), nullable=False),
    Column("memory_mib", Integer, nullable=False),
    Column("worker", Integer, nullable=False),
    Column("released_at", Float),
)
#: A second lease on a GPU that is not given back cannot be written, whatever the code does.
Index(
    "ux_lease_gpus_held",
    lease_gpus.c.gpu_uuid,
    unique=True,
    sqlite_where=text("released_at IS NULL"),
    postgresql_where=text("released_at IS NULL"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("run_id", String(64), nullable=False),
    Column("owner", String(64), nullable=False),
    Column("server", String(64), nullable=False),
    Column("notebook_lease", String(40)),
    Column("lease_id", String(40), ForeignKey("leases.id"), nullable=False),
    Column("image", String(255), nullable=False),
    Column("nnodes", Integer, nullable=False),
    Column("nproc_per_node", Integer, nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("since", Float, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("reason", Text),
    Column("version", BigInteger, nullable=False),
    UniqueConstraint("owner", "run_id"),
)

workers = Table(
    "workers",
    metadata,
    Column("job_id", String(40), ForeignKey("jobs.id"), primary_key=True),
    Column("index", Integer, primary_key=True),
    Column("node", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("container_id", String(64)),
    Column("exit_code", Integer),
    Column("message", Text),
)

#: GPUs as last seen, so that what exists is known while a node does not answer.
gpus = Table(
    "gpus",
    metadata,
    Column("uuid", String(80), primary_key=True),
    Column("node", String(64), nullable=False, index=True),
    Column("index", Integer, nullable=False),
    Column("model", String(80), nullable=False),
    Column("memory_mib", Integer, nullable=False),
    Column("seen_at", Float, nullable=False),
)
