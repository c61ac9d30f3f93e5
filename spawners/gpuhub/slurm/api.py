"""The one way in which gpuhub asks Slurm, whether by its commands or by slurmrestd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpuhub.errors import InvalidRequest, Unavailable
from gpuhub.slurm.values import GpuTime, Job, Look, Site, Submission


class SlurmUnreachable(Unavailable):
    """slurmctld does not answer: what its jobs do is unknown, and nothing of them is lost."""

    code = "slurm-unreachable"


class SlurmRefused(InvalidRequest):
    """Slurm says no; the text has its own words."""

    code = "slurm-refused"


class SlurmApi(Protocol):
    """Asks one Slurm cluster. Every call raises `SlurmUnreachable` where nobody answers in time.

    A job is told by its number and, where `name` is given, by its name as well: a slurmctld that crashed before it
    could store a job gives that job's number to the next one, which may be anybody's.
    """

    async def look(self) -> Look:
        """All jobs that slurmctld knows, those that ended lately too, and all nodes."""
        ...

    async def job(self, job_id: int, *, name: str | None = None) -> Job | None:
        """One job at this moment; None when slurmctld does not know it (any more)."""
        ...

    async def submit(self, submission: Submission) -> int:
        """Submit a job for its submitter; the job's number.

        Raises:
            SlurmRefused: with Slurm's word for it.
        """
        ...

    async def cancel(self, job_id: int, *, name: str | None = None, at_once: bool = False) -> None:
        """End a job, waiting or running; one that has ended, or that nobody knows, is left alone. `at_once`: also what
        ignores SIGTERM, without KillWait.
        """
        ...

    async def keep(self, job_id: int, *, name: str | None = None) -> None:
        """Make slurmctld store what it knows of a running job soon: of one that backfill has started it does so only
        now and then, and starts it anew when it is itself killed before. One that has ended is left alone.
        """
        ...

    async def set_time_limit(self, job_id: int, seconds: int, *, name: str | None = None) -> None:
        """Let a job that goes on end so many seconds after its start.

        Raises:
            SlurmRefused: it has ended, or that is beyond a limit.
        """
        ...

    async def shrink(self, job_id: int, nodes: Sequence[str], *, name: str | None = None) -> None:
        """Let a running job keep these nodes only, its first one among them.

        Raises:
            SlurmRefused: it has ended, or cannot be changed (yet).
        """
        ...

    async def site(self) -> Site:
        """What an administrator has set up.

        Raises:
            SetupError: Slurm is not there, or of too old a version.
        """
        ...

    async def gpu_time(self, since: float, until: float) -> Sequence[GpuTime]:
        """GPU-time by user and account within that window, of jobs that go on too.

        Raises:
            SlurmRefused: there is no accounting.
        """
        ...

    async def close(self) -> None:
        """Drop the connections."""
        ...


async def require_job(api: SlurmApi, job_id: int, name: str | None) -> None:
    """See that a job that is to be changed is the one that is meant; without a name any of that number is.

    Raises:
        SlurmRefused: it is another one, or there is none; in Slurm's words.
        SlurmUnreachable: nobody can tell.
    """
    if name is not None and await api.job(job_id, name=name) is None:
        raise SlurmRefused("Invalid job id specified")
