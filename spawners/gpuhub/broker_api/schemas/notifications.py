"""Wire models of notifications, and of the destinations to which they are sent for users."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import FailFast, Field, StringConstraints

from gpuhub.broker_api.schemas.leases import WireModel


class NotificationKind(StrEnum):
    """What a notification reports."""

    #: A request that waited got its GPUs.
    GRANTED = "granted"
    #: A lease ends in ten minutes.
    TIME_LEFT = "time-left"
    #: An idle notebook will be stopped.
    IDLE = "idle"
    JOB_ENDED = "job-ended"
    JOB_FAILED = "job-failed"
    JOB_PREEMPTED = "job-preempted"
    #: A notebook that asks again for its GPUs has lost its container.
    NOTEBOOK_LOST = "notebook-lost"
    #: A user checks a destination.
    TEST = "test"
    #: For the owner of the machines: a node does not answer, or answers again.
    NODE_DOWN = "node-down"
    #: For the owner of the machines: a GPU fails, works again, or stays blocked after a lease.
    GPU_FAILED = "gpu-failed"
    #: For the owner of the machines: a disk is almost full, or no longer.
    DISK_LOW = "disk-low"


#: What a user can choose for a destination.
UserNotificationKind = Literal[
    "granted", "time-left", "idle", "job-ended", "job-failed", "job-preempted", "notebook-lost"
]
#: An Apprise URL. No whitespace and nothing outside ASCII: such characters are percent-encoded.
DestinationUrl = Annotated[str, StringConstraints(min_length=8, max_length=1000, pattern=r"^[\x21-\x7e]+$")]
DestinationName = Annotated[str, StringConstraints(max_length=60, pattern=r"^[^\x00-\x1f\x7f]*$")]
_Kinds = Annotated[tuple[UserNotificationKind, ...], Field(max_length=7), FailFast()]


class DestinationRequest(WireModel):
    """A new destination."""

    #: Apprise URL, such as `ntfys://ntfy.sh/my-topic`; it is never shown again.
    url: Annotated[DestinationUrl, Field(repr=False)]
    #: The user's own name for it; empty for none.
    name: DestinationName = ""
    #: Which notifications are sent there.
    kinds: _Kinds


class DestinationChange(WireModel):
    """Other notifications for a destination."""

    kinds: _Kinds


class DestinationView(WireModel):
    """A destination, as shown to its owner: without its URL."""

    id: str
    name: str
    #: The service and, where it is not a secret, the host, such as `Webhook at example.org`.
    label: str
    kinds: tuple[str, ...]
    created_at: datetime
    #: Notifications that are still to be sent.
    waiting: int
    #: When a message was last accepted there; None if none was.
    sent_at: datetime | None
    #: When the last attempt failed, and why; None if it did not.
    failed_at: datetime | None
    error: str | None


class NotificationView(WireModel):
    """A notification, as shown to its owner."""

    seq: int
    kind: NotificationKind
    at: datetime
    title: str
    body: str
