"""Wire models of the broker's HTTP API: frozen, and unknown fields are refused."""

from __future__ import annotations

from gpuhub.broker_api.schemas.cluster import (
    AccountHours,
    Capabilities,
    ClusterView,
    CordonRequest,
    EventView,
    GpuModelView,
    GpuState,
    GpuView,
    HolderView,
    NodeState,
    NodeView,
    OutsideProcess,
    PartitionView,
    Problem,
    ProfileView,
    QueueEntry,
    ReservationRequest,
    ReservationView,
    UsageSource,
    UsageView,
)
from gpuhub.broker_api.schemas.jobs import (
    ArrayRequest,
    JobRequest,
    JobState,
    JobView,
    UploadResult,
    WorkerState,
    WorkerView,
)
from gpuhub.broker_api.schemas.leases import (
    ActivationRequest,
    ConstraintView,
    ExtensionRequest,
    GroupName,
    LeasedGpuView,
    LeaseRequest,
    LeaseState,
    LeaseView,
    ModelName,
    PendingReasonView,
    Purpose,
    RequestKey,
    RunId,
    ServerName,
    Slug,
    Text,
    TimeLimit,
    UserName,
    WireModel,
)

__all__ = [
    "AccountHours", "ActivationRequest", "ArrayRequest", "Capabilities", "ClusterView", "ConstraintView",
    "CordonRequest", "EventView", "ExtensionRequest", "GpuModelView", "GpuState", "GpuView", "GroupName",
    "HolderView", "JobRequest", "JobState", "JobView", "LeaseRequest", "LeaseState", "LeaseView", "LeasedGpuView",
    "ModelName", "NodeState", "NodeView", "OutsideProcess", "PartitionView", "PendingReasonView", "Problem",
    "ProfileView", "Purpose", "QueueEntry", "RequestKey", "ReservationRequest", "ReservationView", "RunId",
    "ServerName", "Slug", "Text", "TimeLimit", "UploadResult", "UsageSource", "UsageView", "UserName", "WireModel",
    "WorkerState", "WorkerView",
]  # fmt: skip
