"""What goes over the wire between the broker and its clients. Frozen; unknown fields are refused."""

from __future__ import annotations

from gpuhub.broker.schemas.base import GroupName, Key, Model, RunId, ServerName, Slug, Text, TimeLimit, UserName, Wire
from gpuhub.broker.schemas.cluster import (
    AccountHours,
    ClusterView,
    CordonRequest,
    CountedBy,
    Event,
    GpuState,
    GpuView,
    Holder,
    KindView,
    NodeState,
    NodeView,
    OutsideProcess,
    PartitionView,
    Problem,
    ProfileView,
    QueueEntry,
    Reservation,
    ReservationRequest,
    UsageView,
)
from gpuhub.broker.schemas.jobs import ArrayRequest, Job, JobRequest, JobState, Unpacked, Worker, WorkerState
from gpuhub.broker.schemas.leases import (
    Activation,
    Extension,
    Gpu,
    Lease,
    LeaseRequest,
    LeaseState,
    Obstacle,
    Purpose,
    Why,
)

__all__ = [
    "AccountHours", "Activation", "ArrayRequest", "ClusterView", "CordonRequest", "CountedBy", "Event", "Extension",
    "Gpu", "GpuState", "GpuView", "GroupName", "Holder", "Job", "JobRequest", "JobState", "Key", "KindView",
    "Lease", "LeaseRequest", "LeaseState", "Model", "NodeState", "NodeView", "Obstacle", "OutsideProcess",
    "PartitionView", "Problem", "ProfileView", "Purpose", "QueueEntry", "Reservation", "ReservationRequest",
    "RunId", "ServerName", "Slug", "Text", "TimeLimit", "Unpacked", "UsageView", "UserName", "Why", "Wire",
    "Worker", "WorkerState",
]  # fmt: skip
