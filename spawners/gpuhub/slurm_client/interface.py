"""The interface of Slurm clients, which use Slurm's commands or slurmrestd, and their errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpuhub.common.errors import InvalidRequest, SchedulerUnreachable
from gpuhub.slurm_client.models import GpuTime, SlurmJob, SlurmSite, SlurmSnapshot, SlurmSubmission

#: Reason of a node whose drain gpuhub has ended. Since 23.11, Slurm without slurmdbd keeps the last reason until a job
#: starts there, also for a drain by `scontrol reboot`, and that of gpuhub's drain would stand for a GPU that fails.
UNDRAIN_REASON = "gpuhub: all GPUs work again"


class SlurmUnreachable(SchedulerUnreachable):
    """slurmctld does not answer: the state of its jobs is unknown, and no job is lost."""

    code = "slurm-unreachable"


class SlurmRefused(InvalidRequest):
    """Slurm refuses; the text contains its message."""

    code = "slurm-refused"


class SlurmClient(Protocol):
    """A client of one Slurm cluster. Every call raises `SlurmUnreachable` if Slurm does not answer in time.

    A job is identified by its number and, if `name` is given, by its name as well: a slurmctld that crashed before it
    could store a job assigns that job's number to the next one, which may belong to another user.
    """

    async def read_snapshot(self) -> SlurmSnapshot:
        """Return all nodes and all jobs that slurmctld knows, among them recently ended ones."""
        ...

    async def find_job(self, job_id: int, *, name: str | None = None) -> SlurmJob | None:
        """Return one job, or None if slurmctld does not know it."""
        ...

    async def submit(self, submission: SlurmSubmission) -> int:
        """Submit a job for its submitter and return its number.

        Raises:
            SlurmRefused: Slurm refuses; the text has the reason.
        """
        ...

    async def cancel(self, job_id: int, *, name: str | None = None, at_once: bool = False) -> None:
        """Cancel a pending or running job; an ended or unknown one is ignored.

        Args:
            at_once: Also end a job that ignores SIGTERM without waiting for KillWait.
        """
        ...

    async def persist_job(self, job_id: int, *, name: str | None = None) -> None:
        """Make slurmctld store the state of a running job soon; an ended job is ignored.

        The state of a job that backfill has started is stored only at intervals. A slurmctld that is killed before
        would start the job again.
        """
        ...

    async def set_time_limit(self, job_id: int, seconds: int, *, name: str | None = None) -> None:
        """Set the time limit of a job to `seconds` after its start.

        Raises:
            SlurmRefused: The job has ended, or a limit does not allow it.
        """
        ...

    async def shrink(self, job_id: int, nodes: Sequence[str], *, name: str | None = None) -> None:
        """Shrink a running job to the given nodes, which include its first one.

        Raises:
            SlurmRefused: The job has ended or cannot be changed yet.
        """
        ...

    async def drain_node(self, node: str, reason: str) -> None:
        """Let no further job start on a node, in place of its drain and reason of before; what runs there continues.

        Raises:
            SlurmRefused: Slurm refuses; the text has the reason.
        """
        ...

    async def undrain_node(self, node: str) -> None:
        """End the drain of a node.

        Raises:
            SlurmRefused: Slurm refuses; the text has the reason.
        """
        ...

    async def read_site(self) -> SlurmSite:
        """Return the cluster's configuration.

        Raises:
            SetupError: Slurm is not installed, or its version is too old.
        """
        ...

    async def read_gpu_time(self, since: float, until: float) -> Sequence[GpuTime]:
        """Return GPU time by user and account within the window, also of running jobs.

        Raises:
            SlurmRefused: There is no accounting.
        """
        ...

    async def close(self) -> None: ...
