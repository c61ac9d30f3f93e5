"""The tables of the broker's database. A change needs a migration in `migrations/versions`."""

from __future__ import annotations

from typing import Any

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
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

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

#: GPUs as last read, so that they are known while a node does not answer.
gpus = Table(
    "gpus",
    metadata,
    Column("uuid", String(80), primary_key=True),
    Column("node", String(64), nullable=False, index=True),
    Column("index", Integer, nullable=False),
    Column("model", String(80), nullable=False),
    Column("memory_mib", Integer, nullable=False),
    #: CUDA compute capability, such as `8.9`.
    Column("capability", String(8)),
    Column("is_mig", Boolean, nullable=False, server_default=false()),
    Column("seen_at", Float, nullable=False),
)

#: What is known of each GPU beyond its readings: its fastest PCIe link under load in this node.
gpu_records = Table(
    "gpu_records",
    metadata,
    Column("gpu_uuid", String(80), primary_key=True),
    Column("node", String(64), nullable=False, index=True),
    Column("link_generation", Integer),
    Column("link_width", Integer),
)

#: Faults of GPUs that are not over; `kind` is `xid` or `link`.
gpu_faults = Table(
    "gpu_faults",
    metadata,
    Column("gpu_uuid", String(80), ForeignKey("gpu_records.gpu_uuid"), primary_key=True),
    Column("kind", String(8), primary_key=True),
    Column("code", Integer, primary_key=True, autoincrement=False),
    Column("node", String(64), nullable=False),
    #: By the node's clock.
    Column("occurred_at", Float, nullable=False),
    Column("noticed_at", Float, nullable=False),
    Column("boot_id", String(64)),
    Column("text", Text, nullable=False),
    #: The administrator who accepted the GPU again.
    Column("accepted_by", String(64)),
)

#: Cordoned nodes; `state` is `cordoned` or `draining`.
cordons = Table(
    "cordons",
    metadata,
    Column("node", String(64), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("by", String(64), nullable=False),
    Column("reason", Text, nullable=False),
    Column("at", Float, nullable=False),
    Column("grace_s", Integer, nullable=False),
)

#: Nodes that may sleep.
node_power = Table(
    "node_power",
    metadata,
    Column("node", String(64), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("changed_at", Float, nullable=False),
    #: Seconds that the last wakings took.
    Column("wake_times_s", JSON, nullable=False, server_default="[]"),
    Column("retry_at", Float),
    Column("error", Text),
)

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

reservations = Table(
    "reservations",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("name", Text, nullable=False),
    Column("nodes", JSON, nullable=False),
    Column("gpus", JSON, nullable=False),
    Column("users", JSON, nullable=False),
    Column("groups", JSON, nullable=False),
    Column("starts_at", Float, nullable=False),
    Column("ends_at", Float, nullable=False),
    Column("created_by", String(64), nullable=False),
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

#: The same by day (since 1970, UTC), which stays after leases and jobs were deleted.
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

#: The newest events of each owner.
events = Table(
    "events",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("text", Text, nullable=False),
    Column("owner", String(64)),
    Column("lease", String(40)),
    Column("job", String(40)),
    Column("node", String(64)),
    # A number is never used twice, even after the newest events were deleted.
    sqlite_autoincrement=True,
)
Index("ix_events_owner_seq", events.c.owner, events.c.seq)

#: Notifications of each owner, and of the owner of the machines (`owner` null).
notifications = Table(
    "notifications",
    metadata,
    Column("seq", Integer, primary_key=True),
    #: The same event makes one notification, even if it is reported again after a restart.
    Column("key", String(200), nullable=False, unique=True),
    Column("kind", String(24), nullable=False),
    Column("owner", String(64)),
    Column("at", Float, nullable=False),
    Column("valid_until", Float, nullable=False),
    Column("title", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("subject", String(160), nullable=False, server_default=""),
    Column("is_open", Boolean, nullable=False, server_default=false()),
    sqlite_autoincrement=True,
)
Index("ix_notifications_owner_seq", notifications.c.owner, notifications.c.seq)
Index("ix_notifications_subject", notifications.c.subject)

#: Where users have notifications sent; `url` is encrypted.
destinations = Table(
    "destinations",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("owner", String(64), nullable=False, index=True),
    Column("name", String(60), nullable=False),
    Column("label", String(120), nullable=False),
    Column("url", Text, nullable=False),
    Column("kinds", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("sent_at", Float),
    Column("failed_at", Float),
    Column("error", Text),
)

#: The outbox: one notification for one destination.
deliveries = Table(
    "deliveries",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("notification", Integer, ForeignKey("notifications.seq"), nullable=False),
    #: Id of a destination, or `file:` and a keyed hash of a line of the file of the owner of the machines.
    Column("destination", String(40), nullable=False, index=True),
    Column("owner", String(64)),
    #: `waiting`, `sending`, `sent` or `failed`.
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("next_at", Float, nullable=False),
    #: The broker ended while it was being sent.
    Column("is_repeated", Boolean, nullable=False, server_default=false()),
    UniqueConstraint("notification", "destination"),
    sqlite_autoincrement=True,
)
Index("ix_deliveries_state_next_at", deliveries.c.state, deliveries.c.next_at)

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
