"""Wire models of live views: what a stream sends whenever it changes."""

from __future__ import annotations

from datetime import datetime

from gpuhub.broker_api.schemas.jobs import JobState
from gpuhub.broker_api.schemas.leases import LeaseView, WireModel
from gpuhub.broker_api.schemas.output_shares import OutputShareView
from gpuhub.broker_api.schemas.usage import UsageView


class JobSummaryView(WireModel):
    """A job in a list, without its workers."""

    id: str
    run_id: str
    name: str
    state: JobState
    #: Its lease, which can be extended.
    lease: str
    nodes: tuple[str, ...]
    gpu_count: int
    #: Such as `1 node × 2 GPUs`.
    wants: str
    #: Only detached jobs have output that the broker can read.
    detached: bool
    #: Position in the queue, and why it waits; None unless it waits.
    position: int | None
    waiting_for: str | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    #: Why it ended, for the user.
    reason: str | None
    exit_code: int | None


class OwnView(WireModel):
    """The caller's own leases, jobs and usage; for administrators also what all users use."""

    #: Leases that have GPUs or containers, and waiting requests: the oldest of each.
    leases: tuple[LeaseView, ...]
    #: Number of further ones.
    more_leases: int = 0
    #: Jobs that have not ended, the newest first, and then those that ended last.
    jobs: tuple[JobSummaryView, ...]
    #: Number of further jobs that have not ended.
    more_jobs: int = 0
    usage: UsageView | None
    #: Output shares, given and received: the newest ones, and the number of further ones.
    shares: tuple[OutputShareView, ...] = ()
    more_shares: int = 0
    #: For administrators: the usage of all users, and leases that only proof or an administrator can end.
    all_usage: tuple[UsageView, ...] = ()
    quarantined: tuple[LeaseView, ...] = ()


class SharedJobView(WireModel):
    """A job, as shown to a user with whom its output is shared."""

    owner: str
    job: JobSummaryView
    #: Such as `2 × RTX 5090`; `no GPU` before the grant.
    gpus: str
    #: When the share ends; None for the owner.
    expires_at: datetime | None
