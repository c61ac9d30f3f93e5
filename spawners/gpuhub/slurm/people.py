"""Names of users whom Slurm tells by number only."""

from __future__ import annotations

import asyncio
import pwd
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from gpuhub.slurm.values import Job


class People:
    """The head node's name service, asked once for each user that it knows."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    async def named(self, jobs: Sequence[Job]) -> tuple[Job, ...]:
        """The same jobs, with the names of their users where the head node knows them."""
        unknown = {job.user_id for job in jobs if not job.user_name} - self._names.keys()
        if unknown:
            # It may be a directory on the network.
            self._names |= await asyncio.to_thread(_look_up, unknown)
        return tuple(job if job.user_name else replace(job, user_name=self._names.get(job.user_id, "")) for job in jobs)


def _look_up(numbers: set[int]) -> dict[int, str]:
    names = {}
    for number in numbers:
        with suppress(KeyError):
            names[number] = pwd.getpwuid(number).pw_name
    return names
