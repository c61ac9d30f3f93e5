"""Detached jobs of the validation, requested as `gpu-launch run` does it: files to the home, then a job for them.

The files of the run folder have the form of `gpu_launch.detached.job_files`, which gpuhub does not import; a contract
test reads them with that package.
"""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import tarfile
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.schemas import JobRequest, JobState, JobView, WorkerView
from gpuhub.common.errors import GpuhubError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.broker_connection import connect_to_broker
from gpuhub.ops.validation.user_token import issue_token

_PROGRAMS = "gpuhub.ops.validation.programs"
RESULT = "result.json"
#: Where gpu-launch has the folders of runs, below the home.
_RUN_FOLDERS = ".gpu_launch/jobs"
#: The user's token also ends with the command; hours for the largest clusters. Seconds.
_TOKEN_S = 6 * 3600
#: Maximum time of one long poll, seconds.
_POLL_S = 20.0
#: Time in which a job that is ended has removed its containers, seconds.
_END_S = 30.0
#: Lines of a failed job's output that its error has.
_OUTPUT_LINES = 8


def new_run_id() -> str:
    """Return a new run id in the form of gpu-launch, which removes old run folders by the order of their names."""
    return f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


@dataclass(frozen=True, kw_only=True)
class ValidationJob:
    """A job to request: one program on one or several nodes, with one GPU on each."""

    #: One of the validation's own programs, or with `is_module` a module of gpu-launch.
    program: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    nnodes: int = 1
    exclude_nodes: tuple[str, ...] = ()
    #: Time from the request to the end, seconds.
    limit_s: float
    run_id: str = field(default_factory=new_run_id)


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """What became of a job."""

    #: The containers with their GPUs, as the broker granted them; empty for a job that got none.
    workers: tuple[WorkerView, ...] = ()
    #: What the program wrote; None if it did not.
    result: Mapping[str, Any] | None = None
    #: Why there is no result; empty where there is one.
    error: str = ""


def build_run_folder(run_id: str) -> str:
    """Return the folder of a run, below the home."""
    return f"{_RUN_FOLDERS}/{run_id}"


def build_files(job: ValidationJob) -> dict[str, bytes]:
    """Return the files of the job's run folder by name: the program, and what gpu-launch reads."""
    name = f"{job.program}.py"
    started = ("--module", job.program) if job.is_module else (name,)
    manifest = {
        "name": f"validate {job.program}",
        "words": ["--nproc-per-node=1", *started, *job.arguments],
        "folder": build_run_folder(job.run_id),
        "version": 1,
    }
    settings = {"is_launch": True, "detached": True, "heartbeat_misses": 20}
    return {
        "job.json": json.dumps(manifest).encode(),
        "run.json": json.dumps(settings).encode(),
        **({} if job.is_module else {name: (files(_PROGRAMS) / name).read_bytes()}),
    }


def build_tar(contents: Mapping[str, bytes]) -> bytes:
    """Return a tar of files that only their owner may read."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def read_first_file(tar_bytes: bytes) -> bytes:
    """Return the content of the first file of a tar.

    Raises:
        GpuhubError: It has none.
    """
    with tarfile.open(fileobj=io.BytesIO(tar_bytes)) as tar:
        for member in tar:
            if (file := tar.extractfile(member)) is not None:
                return file.read()
    raise GpuhubError("the answer of the broker has no file")


class JobRunner:
    """Runs jobs as one user; `end_all` ends those that still run, whatever happened before."""

    def __init__(self, user: AsyncBrokerClient, administrator: AsyncBrokerClient) -> None:
        """Requests are the user's; only `end_all` uses the administrator's rights, when the token may be invalid."""
        self._user, self._administrator = user, administrator
        self._run_ids: set[str] = set()
        #: The broker permits a user few transfers at once.
        self._transfer = asyncio.Lock()
        #: The leases of all jobs, by which their containers are found.
        self.lease_ids: set[str] = set()

    async def run_together(self, jobs: Sequence[ValidationJob]) -> list[JobResult]:
        """Run jobs that wait for each other; the first one that fails ends the others. Return the result of each."""
        failures: list[str] = []

        async def run_one(job: ValidationJob) -> JobResult:
            outcome = await self.run(job)
            if not outcome.error:
                return outcome
            if failures:
                return replace(outcome, error=f"it was ended, because {failures[0]} failed")
            failures.append(job.run_id)
            with suppress(GpuhubError):
                await self._end_runs(self._user, {other.run_id for other in jobs})
            return outcome

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_one(job)) for job in jobs]
        return [task.result() for task in tasks]

    async def run(self, job: ValidationJob) -> JobResult:
        """Run a job to its end, or end it at its time limit; errors become its result."""
        try:
            view = await self._request(job)
        except GpuhubError as error:
            return JobResult(error=f"it could not be requested: {error}")
        workers: tuple[WorkerView, ...] = ()
        try:
            async with asyncio.timeout(job.limit_s):
                while view.state is not JobState.ENDED:
                    workers = view.workers or workers
                    view = await self._user.get_job(view.id, wait_s=_POLL_S, version=view.version)
        except TimeoutError:
            waits = f", waiting for {view.lease.waiting_for}" if view.lease.waiting_for else ""
            late = f"it was {view.state}{waits} after {job.limit_s:.0f} s, and was ended"
            output = await self._read_output(view)
            await self._end(view)
            return JobResult(workers=workers, error=f"{late}{output}")
        except GpuhubError as error:
            await self._end(view)
            return JobResult(workers=workers, error=f"it could not be followed, and was ended: {error}")
        return await self._read_result(job, view, workers)

    async def end_all(self) -> None:
        """End every job that still runs."""
        await self._end_runs(self._administrator, self._run_ids)

    async def _end_runs(self, client: AsyncBrokerClient, run_ids: Collection[str]) -> None:
        for view in await client.jobs():
            if view.run_id in run_ids:
                await client.end_job(view.id)

    async def _request(self, job: ValidationJob) -> JobView:
        async with self._transfer:
            await self._user.upload(build_run_folder(job.run_id), build_tar(build_files(job)))
        # Before the request: the broker may accept it although its answer does not arrive.
        self._run_ids.add(job.run_id)
        view = await self._user.request_job(
            JobRequest(
                run_id=job.run_id,
                nnodes=job.nnodes,
                exclude_nodes=job.exclude_nodes,
                detached=True,
                name=f"validate {job.program}",
                time_limit_s=max(60, round(job.limit_s) + 60),
            )
        )
        self.lease_ids.add(view.lease.id)
        return view

    async def _read_result(self, job: ValidationJob, view: JobView, workers: tuple[WorkerView, ...]) -> JobResult:
        if view.exit_code != 0:
            reason = f": {view.reason}" if view.reason else ""
            output = await self._read_output(view)
            return JobResult(workers=workers, error=f"it ended with exit code {view.exit_code}{reason}{output}")
        try:
            async with self._transfer:
                tar = await self._user.download(f"{build_run_folder(job.run_id)}/{RESULT}")
            return JobResult(workers=workers, result=json.loads(read_first_file(tar)))
        except (GpuhubError, ValueError, tarfile.TarError) as error:
            return JobResult(workers=workers, error=f"its result could not be read: {error}")

    async def _read_output(self, view: JobView) -> str:
        try:
            async with self._transfer:
                text = (await self._user.read_job_output(view.id)).decode(errors="replace")
        except GpuhubError as error:
            return f"; its output could not be read: {error}"
        lines = [line for line in text.splitlines() if line.strip()][-_OUTPUT_LINES:]
        return f"; the end of its output: {' | '.join(lines)}" if lines else "; it wrote no output"

    async def _end(self, view: JobView) -> None:
        """End a job, and wait until it has ended, since the next part needs its GPUs."""
        try:
            async with asyncio.timeout(_END_S):
                view = await self._user.end_job(view.id)
                while view.state is not JobState.ENDED:
                    view = await self._user.get_job(view.id, wait_s=_POLL_S, version=view.version)
        except (TimeoutError, GpuhubError):
            return  # the last part reports what is still there


@asynccontextmanager
async def run_as_user(
    cluster: ClusterSettings, paths: Paths, user: str, administrator: AsyncBrokerClient
) -> AsyncIterator[tuple[AsyncBrokerClient, JobRunner]]:
    """Yield a client of the broker with a user's token, and a runner of that user's jobs, which ends them afterwards.

    Args:
        cluster: The settings that the services run with.
        paths: Those of the instance.
        user: The owner of all jobs.
        administrator: Ends the jobs.

    Raises:
        GpuhubError: The user gets no token, or the broker refuses to end the jobs.
    """
    with issue_token(paths, user, _TOKEN_S, cluster.database) as token:
        client = connect_to_broker(paths, token)
        try:
            async with end_jobs(JobRunner(client, administrator)) as runner:
                yield client, runner
        finally:
            await client.close()


@asynccontextmanager
async def end_jobs(runner: JobRunner) -> AsyncIterator[JobRunner]:
    """Yield the runner, and end its jobs in any case."""
    try:
        yield runner
    finally:
        await runner.end_all()
