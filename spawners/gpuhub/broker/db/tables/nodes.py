"""Tables of nodes, GPUs and reservations."""

from __future__ import annotations

from sqlalchemy import JSON, Boolean, Column, Float, ForeignKey, Integer, String, Table, Text, false

from gpuhub.broker.db.tables.metadata import metadata

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
    #: Time of the fault by the node's clock.
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
