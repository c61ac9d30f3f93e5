"""GPU-hours as Slurm's accounting counts them, shown in place of the broker's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from gpuhub.backends.interface import AccountedHours
from gpuhub.backends.slurm.accounting import KEEP_S, WEEK_S, SlurmAccounting, put_times
from gpuhub.broker_api.schemas import AccountHours, UsageSource, UsageView
from gpuhub.common.errors import GpuhubError
from gpuhub.domain.clock import Clock
from gpuhub.slurm_client.interface import SlurmRefused, SlurmUnreachable
from gpuhub.slurm_client.models import GpuTime

TIMES = (
    GpuTime(user="ada", account="lab", gpu_seconds=3600.0),
    GpuTime(user="ada", account="course", gpu_seconds=1800.0),
    GpuTime(user="ada", account="lab", gpu_seconds=900.0),
    GpuTime(user="eve", account="lab", gpu_seconds=7200.0),
)


def view(owner: str, **changes: object) -> UsageView:
    return UsageView(
        owner=owner,
        gpus=1,
        waiting=2,
        gpu_hours_week=9.5,
        decayed_gpu_hours=3.0,
        penalty_s=60.0,
        max_gpus=None,
        max_gpu_hours_week=None,
        max_waiting=16,
    ).model_copy(update=changes)


def hours(account: str, value: float) -> AccountHours:
    return AccountHours(account=account, gpu_hours_week=value)


def test_slurm_usage_replaces_that_of_the_broker():
    """Hours are summed by account; who used nothing has none; the rest of a view stays."""
    assert put_times([view("ben"), view("ada")], TIMES, is_everybody=False) == [
        view(
            "ada",
            gpu_hours_week=1.75,
            counted_by=UsageSource.SLURM,
            accounts=(hours("course", 0.5), hours("lab", 1.25)),
        ),
        view("ben", gpu_hours_week=0.0, counted_by=UsageSource.SLURM),
    ]


def test_users_without_leases_are_shown_only_to_administrators():
    """Somebody without a lease has a line there, and nowhere else."""
    views = put_times([view("ada")], TIMES, is_everybody=True)
    assert [(one.owner, one.gpus, one.gpu_hours_week) for one in views] == [("ada", 1, 1.75), ("eve", 0, 2.0)]


def test_usage_of_the_broker_is_kept_without_accounting():
    """It only says that fair share does not go by it."""
    assert put_times([view("ada")], None, is_everybody=True) == [view("ada", counted_by=UsageSource.BROKER)]


class SteppedClock(Clock):
    """Goes on when it is told to."""

    seconds = 1_790_000_000.0

    def wall(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds


@dataclass
class Accounting:
    """slurmdbd as the broker asks it; `says` is what comes back."""

    says: Sequence[GpuTime] | GpuhubError = TIMES
    asked: list[tuple[float, float]] = field(default_factory=list)

    async def read_gpu_time(self, since: float, until: float) -> Sequence[GpuTime]:
        self.asked.append((since, until))
        if isinstance(self.says, GpuhubError):
            raise self.says
        return self.says


@pytest.mark.parametrize(
    "error", [SlurmRefused("there is no accounting"), SlurmUnreachable("slurmdbd does not answer")]
)
async def test_slurmdbd_usage_is_cached_and_optional(error: GpuhubError):
    """One question serves everybody for a while; meanwhile, and while nobody answers, there is always an answer."""
    accounting, clock = Accounting(), SteppedClock()
    times = SlurmAccounting(accounting, clock)
    for _ in range(3):
        (mine,) = await times.fill([view("ada")], is_everybody=False)
        assert (mine.gpu_hours_week, mine.counted_by) == (1.75, UsageSource.SLURM)
    assert accounting.asked == [(clock.now() - WEEK_S, clock.now())]
    accounting.says = error
    clock.seconds += KEEP_S
    for _ in range(3):
        (mine,) = await times.fill([view("ada")], is_everybody=False)
        assert (mine.gpu_hours_week, mine.counted_by) == (9.5, UsageSource.BROKER)
    assert len(accounting.asked) == 2
    accounting.says = TIMES
    clock.seconds += KEEP_S
    (mine,) = await times.fill([view("ada")], is_everybody=False)
    assert mine.counted_by is UsageSource.SLURM


async def test_hours_of_a_period_by_user_and_account():
    """Whole hours, asked for once for everyone; None while slurmdbd does not answer."""
    accounting, clock = Accounting(), SteppedClock()
    times = SlurmAccounting(accounting, clock)
    for until in (clock.now(), clock.now() + 1):
        hours = await times.count_hours(clock.now() - 86400 * 3, until)
        assert hours is not None
        assert hours.by_user["ada"] == 1.75
        assert sum(hours.by_account.values()) == sum(hours.by_user.values())
    [(since, until)] = accounting.asked
    assert (since % 3600, until % 3600, since < until) == (0, 0, True)
    assert await times.count_hours(clock.now(), clock.now() + 1) == AccountedHours({}, {})
    clock.seconds += KEEP_S
    accounting.says = SlurmUnreachable("slurmdbd does not answer")
    assert await times.count_hours(clock.now() - 86400 * 3, clock.now()) is None
