"""Wire models of what jobs and notebooks used and cost, and of reports about it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from gpuhub.broker_api.schemas.leases import Purpose, WireModel


class CostView(WireModel):
    """What one job, or one notebook, has used of its GPUs; None for what was not measured."""

    #: Id of the job, or of the notebook's lease.
    id: str
    owner: str
    purpose: Purpose
    #: Name of the job, or of the notebook server, which is empty for the default one.
    name: str
    #: Model of its GPUs, with commas between different ones, and the most GPUs that it had at the same time.
    model: str
    gpu_count: int
    started_at: datetime
    #: None while it holds GPUs, and while its job waits for GPUs again.
    ended_at: datetime | None
    #: Time for which it held GPUs; a share of a GPU counts as its part.
    gpu_hours: float
    #: Mean use of its GPUs.
    busy_percent: float | None
    #: Maximum memory in use on one GPU, and the memory of that GPU.
    peak_memory_mib: int | None
    memory_mib: int
    energy_kwh: float | None
    #: Whether some of the energy was not counted by the GPU itself.
    is_energy_estimated: bool
    #: Money, by the prices of that time; None without prices.
    cost: float | None
    currency: str
    #: Model of a smaller GPU of the cluster that would have been enough; None if none would, or it is not known.
    smaller_gpu: str | None
    #: All of it in one line, for users.
    text: str


class ReportDimension(StrEnum):
    """What the rows of a report are for."""

    USER = "user"
    GROUP = "group"
    PROFILE = "profile"
    MODEL = "model"
    WEEK = "week"
    DAY = "day"


class ReportRow(WireModel):
    """Sums of a report; None for what was not measured."""

    #: The user, group, profile or model; for weeks and days the date of the first day. `jobs` for the profile of jobs,
    #: `no group` for users without one, and `total` in the last rows.
    key: str
    gpu_hours: float
    busy_percent: float | None
    peak_memory_mib: int | None
    energy_kwh: float | None
    is_energy_estimated: bool
    #: None without prices. Rows differ in the currency where it was changed.
    cost: float | None
    currency: str
    #: GPU-hours that another scheduler's accounting counts, jobs from outside gpuhub included; None where none counts,
    #: and for users who are not administrators.
    accounted_gpu_hours: float | None = None


class ReportView(WireModel):
    """What was used from one day to another, both included (UTC)."""

    by: ReportDimension
    since: str
    until: str
    #: None for all users.
    owner: str | None
    rows: tuple[ReportRow, ...]
    #: One for each currency; none if nothing was used.
    total: tuple[ReportRow, ...]
