"""GPU-hours of users and accounts as Slurm's accounting counts them; where it runs, they replace the broker's count.

The broker counts leases. slurmdbd counts their jobs, and also jobs that users submitted with `sbatch`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from gpuhub.backends.interface import AccountedHours
from gpuhub.broker_api.schemas import AccountHours, UsageSource, UsageView
from gpuhub.common.errors import GpuhubError
from gpuhub.domain.clock import Clock
from gpuhub.slurm_client.interface import SlurmClient, SlurmRefused
from gpuhub.slurm_client.models import GpuTime

log = logging.getLogger(__name__)

WEEK_S = 7 * 86400.0
#: Minimum interval between two queries of slurmdbd, seconds.
KEEP_S = 30.0


class SlurmAccounting:
    """Client of slurmdbd that caches the GPU-time of the last seven days."""

    def __init__(self, api: SlurmClient, clock: Clock, *, keep_s: float = KEEP_S) -> None:
        self._api = api
        self._clock = clock
        self._keep_s = keep_s
        self._lock = asyncio.Lock()
        self._periods_lock = asyncio.Lock()
        self._asked_at = float("-inf")
        self._times: Sequence[GpuTime] | None = None
        #: GPU times by period, each with the time of the query.
        self._periods: dict[tuple[float, float], tuple[float, Sequence[GpuTime] | None]] = {}

    async def fill(self, views: Sequence[UsageView], *, is_everybody: bool) -> list[UsageView]:
        """Return views with Slurm's count; with the broker's where slurmdbd does not answer.

        Args:
            views: One for each owner.
            is_everybody: They are for all users: those whom only Slurm knows are added.
        """
        times = await self._week()
        return put_times(views, times, is_everybody=is_everybody)

    async def count_hours(self, since: float, until: float) -> AccountedHours | None:
        """Return the GPU-hours of a period by user and account; None where slurmdbd does not answer.

        slurmdbd sums up whole hours, and the answer for an hour is kept for a moment.
        """
        period = (since // 3600 * 3600, until // 3600 * 3600)
        if period[0] >= period[1]:
            return AccountedHours({}, {})
        async with self._periods_lock:
            now = self._clock.monotonic()
            self._periods = {key: entry for key, entry in self._periods.items() if now - entry[0] < self._keep_s}
            if period not in self._periods:
                self._periods[period] = now, await self._read(*period)
            times = self._periods[period][1]
        return None if times is None else sum_times(times)

    async def _week(self) -> Sequence[GpuTime] | None:
        async with self._lock:
            if self._clock.monotonic() - self._asked_at >= self._keep_s:
                until = self._clock.now()
                self._times = await self._read(until - WEEK_S, until)
                self._asked_at = self._clock.monotonic()
            return self._times

    async def _read(self, since: float, until: float) -> Sequence[GpuTime] | None:
        try:
            return await self._api.read_gpu_time(since, until)
        except SlurmRefused as error:
            log.info("GPU-hours are the broker's own count: %s", error)
        except GpuhubError as error:
            log.warning("Slurm's accounting does not answer, the broker's own count is shown: %s", error)
        return None


def sum_times(times: Iterable[GpuTime]) -> AccountedHours:
    """Return the hours of each user and of each account."""
    by_user: defaultdict[str, float] = defaultdict(float)
    by_account: defaultdict[str, float] = defaultdict(float)
    for time in times:
        by_user[time.user] += time.gpu_seconds / 3600
        by_account[time.account] += time.gpu_seconds / 3600
    return AccountedHours(by_user, by_account)


def put_times(views: Iterable[UsageView], times: Sequence[GpuTime] | None, *, is_everybody: bool) -> list[UsageView]:
    """Return views with the hours that Slurm counted, sorted by name; `times` is None where it counts none."""
    if times is None:
        return [view.model_copy(update={"counted_by": UsageSource.BROKER}) for view in views]
    hours = _sum_hours(times)
    known = {view.owner: view for view in views}
    if is_everybody:
        known |= {user: _build_view(user) for user in hours if user not in known}
    return [_put_hours(known[owner], hours.get(owner, {})) for owner in sorted(known)]


def _sum_hours(times: Iterable[GpuTime]) -> Mapping[str, Mapping[str, float]]:
    hours: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for time in times:
        hours[time.user][time.account] += time.gpu_seconds / 3600
    return hours


def _put_hours(view: UsageView, by_account: Mapping[str, float]) -> UsageView:
    accounts = tuple(
        AccountHours(account=account, gpu_hours_week=round(hours, 3)) for account, hours in sorted(by_account.items())
    )
    return view.model_copy(
        update={
            "gpu_hours_week": round(sum(by_account.values()), 3),
            "counted_by": UsageSource.SLURM,
            "accounts": accounts,
        }
    )


def _build_view(user: str) -> UsageView:
    """The view of a user who has no lease."""
    return UsageView(
        owner=user,
        gpus=0,
        waiting=0,
        gpu_hours_week=0.0,
        decayed_gpu_hours=0.0,
        penalty_s=0.0,
        max_gpus=None,
        max_gpu_hours_week=None,
        max_waiting=None,
    )
