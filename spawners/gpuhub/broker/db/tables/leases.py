"""Tables of leases, jobs and what is shared of them."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
)

from gpuhub.broker.db.tables.metadata import metadata

leases = Table(
    "leases",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("seq", Integer, nullable=False, unique=True),
    Column("key", String(128), nullable=False),
    Column("owner", String(64), nullable=False),
    Column("groups", JSON, nullable=False, server_default="[]"),
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
    Column("kept_from", Float),
    Column("kept_until", Float),
    Column("is_persistent", Boolean, nullable=False, server_default=false()),
    Column("image", String(255)),
    Column("losses", JSON, nullable=False, server_default="[]"),
    Column("released_at", Float, index=True),
    Column("reason", Text),
    Column("note", Text),
    #: State, its start and the memory moved, of a notebook that is suspended.
    Column("suspension", JSON(none_as_null=True)),
    Column("held_from", Float),
    Column("quarantined_at", Float),
    Column("container_id", String(64)),
    Column("slurm_job", BigInteger),
    Column("is_held", Boolean, nullable=False, server_default=false()),
    Column("nodes", JSON, nullable=False),
    Column("identities", JSON, nullable=False, server_default="{}"),
    Column("sizes", JSON, nullable=False, server_default="{}"),
    Column("version", BigInteger, nullable=False),
)
#: A request that arrives twice makes one lease, even if the code has a bug.
Index("ux_leases_owner_key", leases.c.owner, leases.c.key, unique=True)

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
    Column("share", Integer, nullable=False, server_default="1"),
    Column("part", Integer, nullable=False, server_default="0"),
    Column("shed_at", Float),
    Column("released_at", Float, index=True),
)

# The next two tables have rows only while a GPU is held. They make it impossible to store a second lease on a whole
# GPU, a share granted twice, or a share of a GPU that is held whole, even if the code has a bug.

#: Number of shares into which each held GPU is divided.
gpu_modes = Table(
    "gpu_modes",
    metadata,
    Column("gpu_uuid", String(80), primary_key=True),
    Column("share", Integer, nullable=False),
    UniqueConstraint("gpu_uuid", "share"),
)

held_gpus = Table(
    "held_gpus",
    metadata,
    Column("gpu_uuid", String(80), primary_key=True),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("share", Integer, nullable=False),
    Column("lease_id", String(40), ForeignKey("leases.id"), nullable=False),
    ForeignKeyConstraint(["gpu_uuid", "share"], ["gpu_modes.gpu_uuid", "gpu_modes.share"]),
    CheckConstraint("part >= 0 AND part < share", name="part"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("run_id", String(64), nullable=False),
    Column("owner", String(64), nullable=False),
    Column("server", String(64), nullable=False),
    Column("notebook_lease", String(40)),
    Column("lease_id", String(40), ForeignKey("leases.id"), nullable=False, index=True),
    Column("image", String(255), nullable=False),
    Column("nnodes", Integer, nullable=False),
    Column("min_nnodes", Integer, nullable=False, server_default="1"),
    Column("nproc_per_node", Integer, nullable=False),
    Column("gpus", Integer),
    Column("array", String(64)),
    Column("array_limit", Integer),
    Column("after", String(64)),
    Column("max_retries", Integer, nullable=False, server_default="0"),
    Column("retries", Integer, nullable=False, server_default="0"),
    Column("sleeps", Boolean, nullable=False, server_default=false()),
    Column("times_asleep", Integer, nullable=False, server_default="0"),
    Column("has_failed", Boolean, nullable=False, server_default=false()),
    Column("preemptions", Integer, nullable=False, server_default="0"),
    Column("checkpoint_until", Float),
    Column("detached", Boolean, nullable=False, server_default=false()),
    Column("name", String(80), nullable=False, server_default=""),
    Column("port", Integer),
    Column("port_users", JSON, nullable=False, server_default="[]"),
    Column("joins", String(64)),
    Column("first_worker", Integer, nullable=False, server_default="0"),
    Column("state", String(16), nullable=False, index=True),
    Column("since", Float, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float, index=True),
    Column("exit_code", Integer),
    Column("reason", Text),
    Column("version", BigInteger, nullable=False),
    UniqueConstraint("owner", "run_id"),
)
#: Recent jobs of an owner are searched among all jobs that ever ran.
Index("ix_jobs_owner_ended_at", jobs.c.owner, jobs.c.ended_at)

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

#: Users who may view the output of another user's job, or a saved notebook, until `expires_at`. `subject` is the job's
#: id, or that of the notebook at `path` in the owner's home.
output_shares = Table(
    "output_shares",
    metadata,
    Column("subject", String(40), primary_key=True),
    Column("viewer", String(64), primary_key=True),
    Column("owner", String(64), nullable=False),
    Column("run_id", String(64), nullable=False),
    Column("name", String(80), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("path", String(1024), nullable=False, server_default=""),
)
