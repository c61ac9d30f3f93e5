"""What owners may still be granted."""

from __future__ import annotations

from collections.abc import Mapping

from gpuhub.engines.base import Request, Rights
from gpuhub.engines.usage import Accounts

_NO_RIGHTS = Rights()


class Rooms:
    """How many more GPUs owners may have at one moment; grants of this moment are told."""

    def __init__(self, accounts: Accounts, rights: Mapping[str, Rights], now: float) -> None:
        self._accounts = accounts
        self._rights = rights
        self._now = now
        self._more: dict[str, int] = {}
        self._more_of_group: dict[str, int] = {}
        self._used_up: dict[tuple[str, str | None], bool] = {}
        #: When the first limit frees of those that were in the way; None when none will by itself.
        self.look_again_at: float | None = None

    def may(self, owner: str, request: Request) -> bool:
        """Whether limits allow the owner the least that such a request is content with."""
        if not request.size or owner not in self._rights:
            return True
        most = self.most(owner)
        if most is not None and most < request.least_size:
            return False
        return not self._is_used_up(owner)

    def most(self, owner: str) -> int | None:
        """How many more GPUs the owner may hold; None for any number."""
        rights = self._rights.get(owner)
        if rights is None:
            return None
        left = [
            limits.max_gpus - self._accounts.held_by_group(group) - self._more_of_group.get(group, 0)
            for group, limits in rights.together.items()
            if limits.max_gpus is not None
        ]
        if rights.each.max_gpus is not None:
            left.append(rights.each.max_gpus - self._accounts.held(owner) - self._more.get(owner, 0))
        return min(left, default=None)

    def granted(self, request: Request, gpus: int) -> None:
        """So many GPUs were just granted."""
        self._more[request.owner] = self._more.get(request.owner, 0) + gpus
        for group in request.groups:
            self._more_of_group[group] = self._more_of_group.get(group, 0) + gpus

    def text(self, request: Request) -> str | None:
        """Which limit is in the way, for a person; None when none is."""
        owner, least = request.owner, request.least_size
        rights = self._rights.get(owner, _NO_RIGHTS)
        if not request.size:
            return None
        holds, most = self._accounts.held(owner) + self._more.get(owner, 0), rights.each.max_gpus
        if most is not None and holds + least > most:
            return f"{owner} holds {holds} of at most {most} GPUs and asks for {least} more"
        for group, limits in rights.together.items():
            holds = self._accounts.held_by_group(group) + self._more_of_group.get(group, 0)
            if limits.max_gpus is not None and holds + least > limits.max_gpus:
                return f"{group} holds {holds} of at most {limits.max_gpus} GPUs and {owner} asks for {least} more"
        hours, most_hours = self._accounts.hours(owner, self._now), rights.each.gpu_hours_per_week
        if most_hours is not None and hours >= most_hours:
            return f"{owner} used {hours:.4g} of at most {most_hours:.4g} GPU-hours in seven days"
        for group, limits in rights.together.items():
            hours, most_hours = self._accounts.hours_of_group(group, self._now), limits.gpu_hours_per_week
            if most_hours is not None and hours >= most_hours:
                return f"{group} used {hours:.4g} of at most {most_hours:.4g} GPU-hours in seven days"
        return None

    def _is_used_up(self, owner: str) -> bool:
        """Whether the owner, or a group of the owner, used up the hours of seven days."""
        rights = self._rights[owner]
        asked: list[tuple[str, str | None, float | None]] = [(owner, None, rights.each.gpu_hours_per_week)]
        asked += [("", group, limits.gpu_hours_per_week) for group, limits in rights.together.items()]
        is_used_up = False
        for name, group, most in asked:
            if most is None:
                continue
            key = name, group
            if key not in self._used_up:
                self._used_up[key] = self._check(name, group, most)
            is_used_up = is_used_up or self._used_up[key]
        return is_used_up

    def _check(self, owner: str, group: str | None, most: float) -> bool:
        accounts, now = self._accounts, self._now
        hours = accounts.hours(owner, now) if group is None else accounts.hours_of_group(group, now)
        if hours < most:
            return False
        if group is None:
            below_at = accounts.hours_below_at(owner, most, now)
        else:
            below_at = accounts.hours_of_group_below_at(group, most, now)
        if below_at is not None and (self.look_again_at is None or below_at < self.look_again_at):
            self.look_again_at = below_at
        return True
