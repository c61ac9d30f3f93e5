"""The quota of one owner, from `[users]` and `[[groups]]` of cluster.toml, and from what an administrator set for it.

`admission.limits` checks GPUs, waiting requests and jobs, `admission.extend` the length of a lease, and
`scheduler.quota` GPUs in use and GPU-hours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from gpuhub.common.node_access import is_reserved, owner_group
from gpuhub.config.settings import ClusterSettings
from gpuhub.config.users.users import GroupSettings, LimitSettings
from gpuhub.scheduler.interface import Quota, QuotaLimits

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLimits:
    """Limits that an administrator set for one user; None where cluster.toml decides."""

    owner: str
    max_gpus: int | None = None
    gpu_hours_per_week: float | None = None
    max_waiting: int | None = None
    max_jobs: int | None = None
    longest_lease_s: float | None = None
    reason: str = ""
    #: The administrator, and when, in seconds since 1970.
    by: str
    at: float

    def apply(self, limits: QuotaLimits) -> QuotaLimits:
        """Return these limits, and those given for what is not set."""
        values = {name: getattr(self, name) for name in LIMITS}
        return replace(limits, **{name: value for name, value in values.items() if value is not None})


#: The names of all limits.
LIMITS = tuple(field.name for field in fields(QuotaLimits))


def list_groups(cluster: ClusterSettings, owner: str, hub_groups: Iterable[str]) -> frozenset[str]:
    """Return all groups of an owner: the hub's, those of the settings that name the owner, and the owner's own of the
    nodes that are theirs first.
    """
    of_hub = {group for group in hub_groups if not is_reserved(group)}
    of_settings = {group.name for group in cluster.groups if owner in group.members}
    return frozenset(of_hub | of_settings | ({owner_group(owner)} & cluster.node_groups))


def build_quota(cluster: ClusterSettings, owner: str, hub_groups: Iterable[str], own: OwnLimits | None = None) -> Quota:
    """Return an owner's limits and weight.

    A group's limit for each member replaces that of `[users]`; of several groups the largest limit counts. Limits of
    the owner's own replace both. Limits for all members of a group together apply in addition.
    """
    groups = list_groups(cluster, owner, hub_groups)
    own_groups = [group for group in cluster.groups if group.name in groups]
    limits = _build_user_limits(cluster, [group.each for group in own_groups])
    return Quota(
        per_user=limits if own is None else own.apply(limits),
        per_group={group.name: _build_limits(group.together) for group in own_groups if _has_limits(group)},
        weight=max((group.weight for group in own_groups), default=1.0),
    )


def find_max_lease_s(quota: Quota) -> float | None:
    """Return the longest lease in seconds, by the owner's own limit and those of the groups; None for no limit."""
    return _min_limit(limits.longest_lease_s for limits in (quota.per_user, *quota.per_group.values()))


def find_max_gpus(quota: Quota) -> int | None:
    """Return the GPUs that the owner could ever hold at once; None for no limit."""
    return _min_limit(limits.max_gpus for limits in (quota.per_user, *quota.per_group.values()))


def _build_user_limits(cluster: ClusterSettings, allowances: Sequence[LimitSettings]) -> QuotaLimits:
    users = cluster.users
    return QuotaLimits(
        max_gpus=_max_limit((limits.max_gpus for limits in allowances), users.max_gpus),
        gpu_hours_per_week=_max_limit((limits.gpu_hours_per_week for limits in allowances), users.gpu_hours_per_week),
        max_waiting=_max_limit((limits.max_waiting for limits in allowances), users.max_waiting),
        max_jobs=_max_limit((limits.max_jobs for limits in allowances), users.max_jobs),
        longest_lease_s=_max_limit((limits.longest_lease for limits in allowances), users.longest_lease),
    )


def _build_limits(allowance: LimitSettings) -> QuotaLimits:
    return QuotaLimits(
        max_gpus=allowance.max_gpus,
        gpu_hours_per_week=allowance.gpu_hours_per_week,
        max_waiting=allowance.max_waiting,
        max_jobs=allowance.max_jobs,
        longest_lease_s=allowance.longest_lease,
    )


def _has_limits(group: GroupSettings) -> bool:
    return group.together != LimitSettings()


def _max_limit(values: Iterable[N | None], otherwise: N | None) -> N | None:
    return max((value for value in values if value is not None), default=otherwise)


def _min_limit(values: Iterable[N | None]) -> N | None:
    return min((value for value in values if value is not None), default=None)
