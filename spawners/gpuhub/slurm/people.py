"""Names of users whom Slurm tells by number only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpuhub.identity import find_account
from gpuhub.slurm.values import Job

#: Whose number it is; None where nobody knows. It may block.
FindName = Callable[[int], str | None]


class People:
    """Somebody who knows names, asked once for each user that they know."""

    def __init__(self, find_name: FindName = find_account) -> None:
        self._find_name = find_name
        self._names: dict[int, str] = {}

    async def named(self, jobs: Sequence[Job]) -> tuple[Job, ...]:
        """The same jobs, with the names of their users where these are known."""
        unknown = {job.user_id for job in jobs if not job.user_name} - self._names.keys()
        if unknown:
            # It may be a directory on the network.
            self._names |= await asyncio.to_thread(self._look_up, unknown)
        return tuple(job if job.user_name else replace(job, user_name=self._names.get(job.user_id, "")) for job in jobs)

    def _look_up(self, numbers: set[int]) -> dict[int, str]:
        found = {number: self._find_name(number) for number in numbers}
        return {number: name for number, name in found.items() if name is not None}
