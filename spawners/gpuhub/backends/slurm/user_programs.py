"""Programs of users where nodes have no Docker: on the head node for files of their homes, and in their jobs' steps.

Each is `gpu-launch-courier` of the environment or image in which the site's jobs run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from weakref import WeakSet

from gpuhub.backends.slurm.lease_jobs import FindSubmitter
from gpuhub.common.errors import Conflict, NodeUnreachable, Unavailable
from gpuhub.common.program_session import STDERR, STDOUT
from gpuhub.config.settings import ClusterSettings
from gpuhub.config.users.identity import find_account_name
from gpuhub.domain.models import JobRow, LeaseRow
from gpuhub.domain.scheduler_input import build_request
from gpuhub.slurm_client.gpu_selection import count_cpus
from gpuhub.slurm_client.models import Submitter
from gpuhub.slurm_client.programs import SlurmPrograms, build_user_command
from gpuhub.slurm_jobs import scripts

_BLOCK = 64 * 1024
#: Parts of output that are kept until they are read; the program waits then.
_MAX_PARTS = 16
#: Time that a program may take to end once its input has ended, and once more after SIGTERM, seconds.
_END_S = 5.0


class ProcessSession:
    """A process of this machine as a `ProgramSession`."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        """Wrap a process that has pipes; `name` is that of its program for errors."""
        self._process = process
        self._name = name
        self._parts: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(_MAX_PARTS)
        self._streams = asyncio.ensure_future(self._read_streams())
        self._end: asyncio.Future[None] | None = None

    @classmethod
    async def start(cls, command: Sequence[str], submitter: Submitter, environment: dict[str, str]) -> ProcessSession:
        """Start a command as a user.

        Raises:
            Unavailable: It cannot be started.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *build_user_command(command, submitter),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise Unavailable(f"{command[0]} cannot be started on the head node: {error.strerror}") from error
        return cls(process, command[0])

    async def read(self) -> tuple[int, bytes] | None:
        """Return the next part as stream and data; None at the end."""
        part = await self._parts.get()
        if part is None:
            # The next call to read gets it as well.
            self._parts.put_nowait(None)
        return part

    async def send(self, data: bytes) -> None:
        """Write to the program's input.

        Raises:
            NodeUnreachable: The program has ended.
        """
        assert self._process.stdin is not None  # noqa: S101 - for the type checker: it has pipes
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise NodeUnreachable(f"{self._name} has ended") from error

    def close(self) -> None:
        """End the program's input, and the program if it does not end by itself."""
        if self._end is None:
            self._end = asyncio.ensure_future(self._finish())

    async def wait_closed(self) -> None:
        """Close it, and wait until the program has ended."""
        self.close()
        assert self._end is not None  # noqa: S101
        await self._end

    async def _read_streams(self) -> None:
        assert self._process.stdout is not None and self._process.stderr is not None  # noqa: S101
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_stream(STDOUT, self._process.stdout))
            group.create_task(self._read_stream(STDERR, self._process.stderr))
        await self._parts.put(None)

    async def _read_stream(self, number: int, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(_BLOCK):
            await self._parts.put((number, data))

    async def _finish(self) -> None:
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.close()
        for act in (None, self._process.terminate, self._process.kill):
            # A process that sudo has started belongs to another user; the end of its input must do.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if act is not None:
                    act()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self._process.wait()
                    break
        self._streams.cancel()
        await asyncio.wait([self._streams])
        while not self._parts.empty():
            self._parts.get_nowait()
        self._parts.put_nowait(None)


class UserPrograms:
    """Starts couriers as users."""

    def __init__(self, cluster: ClusterSettings, find_submitter: FindSubmitter) -> None:
        self._cluster = cluster
        self._find_submitter = find_submitter
        self._programs = SlurmPrograms(cluster.slurm.commands, cluster.slurm.conf)
        self._sessions: WeakSet[ProcessSession] = WeakSet()

    async def close(self) -> None:
        """End all programs that run."""
        await asyncio.gather(*(session.wait_closed() for session in list(self._sessions)))

    async def start_on_head(self, owner: str, arguments: Sequence[str]) -> ProcessSession:
        """Start a courier on the head node, where it sees the owner's home as on a login node.

        Raises:
            Conflict: The home is not mounted on the head node, or Apptainer would not know the owner there.
            Unavailable, GpuhubError: The courier cannot be started, or the owner may run nothing.
        """
        submitter = await self._find_submitter(owner)
        home = self._cluster.storage.format_home(owner)
        if not await asyncio.to_thread(_exists, home):
            raise Conflict(f"{home} is not on the head node: mount the homes there as on the nodes, for files and logs")
        if self._cluster.slurm.runtime == "apptainer" and find_account_name(submitter.uid) is None:
            raise Conflict(
                f"the head node has no account with the UID {submitter.uid} of {owner}, which Apptainer needs for "
                "files and logs: `gpuhub slurm users` makes it"
            )
        command = scripts.build_head_command(self._cluster, owner, arguments)
        return await self._start(command.words, submitter, command.environment)

    async def start_in_job(self, lease: LeaseRow, job: JobRow, node: str, arguments: Sequence[str]) -> ProcessSession:
        """Start a courier beside the worker on a node, as one more step of its Slurm job.

        Raises:
            Conflict: The launch has no Slurm job.
            Unavailable, GpuhubError: `srun` is not installed or cannot be started, or the owner may run nothing.
        """
        if lease.slurm_job is None:
            raise Conflict(f"job {job.id} has no Slurm job")
        srun = self._programs.find("srun")
        if srun is None:
            raise Unavailable(
                f"terminals need Slurm's command srun, which is not {self._programs.place} on the head node "
                "(Debian: slurm-client)"
            )
        submitter = await self._find_submitter(lease.owner)
        spec = scripts.CourierStepSpec(
            cluster=self._cluster,
            user=lease.owner,
            slurm_job=lease.slurm_job,
            node=self._cluster.node(node).slurm_name,
            run_id=job.joins or job.run_id,
            has_gpus=bool(lease.gpus),
            cpus=count_cpus(build_request(lease)),
        )
        command = scripts.build_step_command(spec, arguments)
        return await self._start([srun, *command.words], submitter, command.environment)

    async def _start(
        self, command: Sequence[str], submitter: Submitter, environment: Mapping[str, str]
    ) -> ProcessSession:
        session = await ProcessSession.start(command, submitter, {**self._programs.environment, **environment})
        self._sessions.add(session)
        return session


def _exists(folder: str) -> bool:
    """Return whether a folder exists, also if this process may not look into the one above it."""
    try:
        return Path(folder).is_dir()
    except PermissionError:
        return True
