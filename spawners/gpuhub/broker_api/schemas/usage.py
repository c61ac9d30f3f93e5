"""Wire models of what owners use and may use."""

from __future__ import annotations

from enum import StrEnum

from gpuhub.broker_api.schemas.leases import WireModel
from gpuhub.broker_api.schemas.limits import UserLimitsView


class UsageSource(StrEnum):
    """Where used GPU-time was counted."""

    #: Counted by the broker, whose fair share uses it.
    BUILTIN = "builtin"
    #: Counted by the broker, since Slurm keeps no accounts or does not answer.
    BROKER = "broker"
    #: Counted by slurmdbd, including jobs from outside gpuhub.
    SLURM = "slurm"


class AccountHours(WireModel):
    """Used GPU-time of a Slurm account."""

    account: str
    gpu_hours_week: float


class UsageView(WireModel):
    """Usage and limits of one owner; None for no limit."""

    owner: str
    gpus: int
    waiting: int
    #: Real GPU-hours in the last seven days.
    gpu_hours_week: float
    #: GPU-hours after decay, weighted by GPU model in hours of a 24 GiB GPU, which fair share uses.
    decayed_gpu_hours: float
    #: Time by which fair share moves the owner's requests back now, seconds.
    penalty_s: float
    max_gpus: int | None
    max_gpu_hours_week: float | None
    max_waiting: int | None
    max_jobs: int | None = None
    longest_lease_s: float | None = None
    #: The limits among these that an administrator set for this user.
    own_limits: UserLimitsView | None = None
    #: Where `gpu_hours_week` was counted; `accounts` has these hours by Slurm account, if Slurm counted them.
    counted_by: UsageSource = UsageSource.BUILTIN
    accounts: tuple[AccountHours, ...] = ()
