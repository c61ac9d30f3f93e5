"""Helpers of both clients for jobs: their owners, the job of a lease, and the end of a job that ignores SIGTERM."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from gpuhub.config.users.identity import UserIdentity, find_account_name
from gpuhub.slurm_client.interface import SlurmClient, SlurmRefused
from gpuhub.slurm_client.models import LIVE_STATES, SlurmJob, SlurmJobState, Submitter


async def require_job(api: SlurmClient, job_id: int, name: str | None) -> None:
    """Check before a change that the job has the expected name; without a name any job of that number is accepted.

    Raises:
        SlurmRefused: It is another job or does not exist; the text is Slurm's.
        SlurmUnreachable: Slurm does not answer.
    """
    if name is not None and await api.find_job(job_id, name=name) is None:
        raise SlurmRefused("Invalid job id specified")


#: Pauses between signals, seconds.
_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6)


async def signal_until_ended(
    find_job: Callable[[], Awaitable[SlurmJob | None]],
    signal: Callable[[], Awaitable[None]],
    withdraw: Callable[[], Awaitable[None]],
) -> None:
    """Signal a job's script for some seconds until it has ended, so that it can be cancelled without KillWait.

    Slurm reports a job as running before its script runs, and a signal is lost then. If it were cancelled at that
    moment, it would get SIGTERM first and remain for KillWait. A pending job is withdrawn and checked again, because it
    may start at the same time. A job that is ending is ignored.
    """
    for pause_s in _PAUSES_S:
        job = await find_job()
        if job is None or job.state not in {SlurmJobState.PENDING, SlurmJobState.RUNNING} or job.is_completing:
            return
        await (withdraw() if job.state is SlurmJobState.PENDING else signal())
        await asyncio.sleep(pause_s)


#: Returns the name of a UID, or None if it is unknown. May block.
FindName = Callable[[int], str | None]


class UserNames:
    """Names of users by UID; each known name is looked up once."""

    def __init__(self, find_name: FindName = find_account_name) -> None:
        self._find_name = find_name
        self._names: dict[int, str] = {}

    async def add_names(self, jobs: Sequence[SlurmJob]) -> tuple[SlurmJob, ...]:
        """Return the jobs with the names of their users, if these are known."""
        unknown = {job.user_id for job in jobs if not job.user_name} - self._names.keys()
        if unknown:
            # In a thread, because the lookup may use a directory on the network.
            self._names |= await asyncio.to_thread(self._resolve, unknown)
        return tuple(job if job.user_name else replace(job, user_name=self._names.get(job.user_id, "")) for job in jobs)

    def _resolve(self, numbers: set[int]) -> dict[int, str]:
        names = {number: self._find_name(number) for number in numbers}
        return {number: name for number, name in names.items() if name is not None}


def build_submitter(identity: UserIdentity) -> Submitter:
    """Build the submitter for a user, whose UID and GID must be the same on Slurm's machines."""
    return Submitter(name=identity.name, uid=identity.uid, gid=identity.gid, groups=identity.groups)


def find_lease_job(jobs: Iterable[SlurmJob], name: str, uid: int | None) -> SlurmJob | None:
    """Return the live job with the name of a lease, or None.

    The job must belong to the owner's UID, because any user can choose the same name. If a submission was repeated
    after a timeout, there may be several; the oldest one counts.
    """
    own = [job for job in jobs if job.name == name and job.user_id == uid and job.state in LIVE_STATES]
    return min(own, key=lambda job: job.id, default=None)
