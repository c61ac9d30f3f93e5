"""Headroom of quotas: the GPUs and GPU-hours that owners may still be granted; other requests wait."""

from __future__ import annotations

from collections.abc import Mapping

from gpuhub.scheduler.interface import Quota, SchedulingRequest
from gpuhub.scheduler.usage import UsageLedger

_NO_QUOTA = Quota()


class QuotaHeadroom:
    """The rest of all quotas at one moment, less the grants of that moment."""

    def __init__(self, usage: UsageLedger, quotas: Mapping[str, Quota], now: float) -> None:
        self._usage = usage
        self._quotas = quotas
        self._now = now
        self._granted: dict[str, int] = {}
        self._granted_to_group: dict[str, int] = {}
        self._exhausted: dict[tuple[str, str | None], bool] = {}
        #: When the first of the exhausted quotas frees; None if none does with time.
        self.decide_again_at: float | None = None

    def allows(self, owner: str, request: SchedulingRequest) -> bool:
        """Return whether the quotas allow the owner the smallest grant that the request accepts."""
        if not request.size or owner not in self._quotas:
            return True
        remaining = self.remaining_gpus(owner)
        if remaining is not None and remaining < request.least_size:
            return False
        return not self._is_exhausted(owner)

    def remaining_gpus(self, owner: str) -> int | None:
        """Return how many more GPUs the owner may hold; None for any number."""
        quota = self._quotas.get(owner)
        if quota is None:
            return None
        remaining = [
            limits.max_gpus - self._usage.count_group_gpus(group) - self._granted_to_group.get(group, 0)
            for group, limits in quota.per_group.items()
            if limits.max_gpus is not None
        ]
        if quota.per_user.max_gpus is not None:
            remaining.append(quota.per_user.max_gpus - self._usage.count_gpus(owner) - self._granted.get(owner, 0))
        return min(remaining, default=None)

    def record_grant(self, request: SchedulingRequest, gpus: int) -> None:
        """Count a grant of this moment."""
        self._granted[request.owner] = self._granted.get(request.owner, 0) + gpus
        for group in request.groups:
            self._granted_to_group[group] = self._granted_to_group.get(group, 0) + gpus

    def explain(self, request: SchedulingRequest) -> str | None:
        """Return which quota blocks the request, for people; None if none does."""
        owner, min_gpus = request.owner, request.least_size
        quota = self._quotas.get(owner, _NO_QUOTA)
        if not request.size:
            return None
        held, limit = self._usage.count_gpus(owner) + self._granted.get(owner, 0), quota.per_user.max_gpus
        if limit is not None and held + min_gpus > limit:
            return f"{owner} holds {held} of at most {limit} GPUs and asks for {min_gpus} more"
        for group, limits in quota.per_group.items():
            held = self._usage.count_group_gpus(group) + self._granted_to_group.get(group, 0)
            if limits.max_gpus is not None and held + min_gpus > limits.max_gpus:
                return f"{group} holds {held} of at most {limits.max_gpus} GPUs and {owner} asks for {min_gpus} more"
        hours, max_hours = self._usage.week_hours(owner, self._now), quota.per_user.gpu_hours_per_week
        if max_hours is not None and hours >= max_hours:
            return f"{owner} used {hours:.4g} of at most {max_hours:.4g} GPU-hours in seven days"
        for group, limits in quota.per_group.items():
            hours, max_hours = self._usage.group_week_hours(group, self._now), limits.gpu_hours_per_week
            if max_hours is not None and hours >= max_hours:
                return f"{group} used {hours:.4g} of at most {max_hours:.4g} GPU-hours in seven days"
        return None

    def _is_exhausted(self, owner: str) -> bool:
        """Return whether the owner, or a group of the owner, has used up its hours of seven days."""
        quota = self._quotas[owner]
        checks: list[tuple[str, str | None, float | None]] = [(owner, None, quota.per_user.gpu_hours_per_week)]
        checks += [("", group, limits.gpu_hours_per_week) for group, limits in quota.per_group.items()]
        is_exhausted = False
        for name, group, limit in checks:
            if limit is None:
                continue
            key = name, group
            if key not in self._exhausted:
                self._exhausted[key] = self._check_hours(name, group, limit)
            is_exhausted = is_exhausted or self._exhausted[key]
        return is_exhausted

    def _check_hours(self, owner: str, group: str | None, limit: float) -> bool:
        usage, now = self._usage, self._now
        hours = usage.week_hours(owner, now) if group is None else usage.group_week_hours(group, now)
        if hours < limit:
            return False
        if group is None:
            below_at = usage.find_time_below(owner, limit, now)
        else:
            below_at = usage.find_group_time_below(group, limit, now)
        if below_at is not None and (self.decide_again_at is None or below_at < self.decide_again_at):
            self.decide_again_at = below_at
        return True
