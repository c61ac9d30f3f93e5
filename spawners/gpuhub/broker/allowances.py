"""What an owner may have: the settings of [users] and [[groups]] for one person. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from gpuhub.engines.base import Limits, Rights
from gpuhub.policy import Allowance, Group
from gpuhub.settings import Cluster

N = TypeVar("N", int, float)


def groups_of(cluster: Cluster, owner: str, hub_groups: Iterable[str]) -> frozenset[str]:
    """All groups of an owner: the hub's, and those of the settings that name the owner."""
    return frozenset(hub_groups) | {group.name for group in cluster.groups if owner in group.members}


def rights_of(cluster: Cluster, owner: str, hub_groups: Iterable[str]) -> Rights:
    """An owner's limits and weight.

    What a group gives each of its members stands instead of what [users] says; of several groups the most generous
    counts. What members of a group may have together comes on top.
    """
    groups = groups_of(cluster, owner, hub_groups)
    mine = [group for group in cluster.groups if group.name in groups]
    return Rights(
        each=_each(cluster, [group.each for group in mine]),
        together={group.name: _limits(group.together) for group in mine if _has_limits(group)},
        weight=max((group.weight for group in mine), default=1.0),
    )


def longest_lease(rights: Rights) -> float | None:
    """Seconds that one lease may last, by the owner's own limit and those of the groups; None for no limit."""
    return _least(limits.longest_lease_s for limits in (rights.each, *rights.together.values()))


def most_gpus(rights: Rights) -> int | None:
    """GPUs that the owner could ever hold at once; None for no limit."""
    return _least(limits.max_gpus for limits in (rights.each, *rights.together.values()))


def _each(cluster: Cluster, allowances: Sequence[Allowance]) -> Limits:
    users = cluster.users
    return Limits(
        max_gpus=_most((one.max_gpus for one in allowances), users.max_gpus),
        gpu_hours_per_week=_most((one.gpu_hours_per_week for one in allowances), users.gpu_hours_per_week),
        max_waiting=_most((one.max_waiting for one in allowances), users.max_waiting),
        max_jobs=_most((one.max_jobs for one in allowances), users.max_jobs),
        longest_lease_s=_most((one.longest_lease for one in allowances), users.longest_lease),
    )


def _limits(allowance: Allowance) -> Limits:
    return Limits(
        max_gpus=allowance.max_gpus,
        gpu_hours_per_week=allowance.gpu_hours_per_week,
        max_waiting=allowance.max_waiting,
        max_jobs=allowance.max_jobs,
        longest_lease_s=allowance.longest_lease,
    )


def _has_limits(group: Group) -> bool:
    return group.together != Allowance()


def _most(values: Iterable[N | None], otherwise: N | None) -> N | None:
    return max((value for value in values if value is not None), default=otherwise)


def _least(values: Iterable[N | None]) -> N | None:
    return min((value for value in values if value is not None), default=None)
