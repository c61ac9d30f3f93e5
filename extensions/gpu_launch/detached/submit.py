"""`%gpu_launch --detach`: from a notebook to a job that runs without it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_launch import environment
from gpu_launch.broker import models
from gpu_launch.broker.client import BrokerClient
from gpu_launch.broker.holdings import Holding, list_holdings
from gpu_launch.common import job_manifest, run_folder
from gpu_launch.common.exchange import ExchangeFiles
from gpu_launch.detached import job_files
from gpu_launch.environment import Environment
from gpu_launch.errors import GpuLaunchError, UsageError
from gpu_launch.launch import dry_run
from gpu_launch.launch.dry_run import DryRunReport
from gpu_launch.launch.plan import check_array, check_guests, missing_broker
from gpu_launch.launch.request import LaunchRequest, ValidatedRequest, validate
from gpu_launch.options import command
from gpu_launch.options.launch_options import LaunchOptions

_MOST_NAME = 80
_DRY_RUN_RETRY_LIMIT_S = 3.0  # seconds for a broker that does not answer


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A job that the broker has accepted."""

    run_id: str
    job_id: str
    folder: Path
    #: `waiting`, or already further.
    state: str
    #: Place in the queue from 1; None unless it waits.
    position: int | None
    #: The reason why it waits, one line for a person.
    waiting_for: str | None
    #: What the user holds of the requested kind, while it waits.
    holdings: tuple[Holding, ...] = ()
    #: Run ids of an array's tasks, whose common id is `run_id`; empty for a single job.
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobServer:
    """The server that a job runs: its name for people, its port, and who reaches it besides the owner."""

    name: str
    port: int
    users: tuple[str, ...] = ()
    #: It starts again at the next request to the port, after it has ended by itself and well.
    sleeps: bool = False


def submit_from_notebook(
    options: LaunchOptions,
    *,
    cell: str | None = None,
    before: Mapping[str, str],
    exchange: ExchangeFiles | None = None,
    server: JobServer | None = None,
) -> Submitted:
    """Submit a launch as a detached job. `before` is the environment when the notebook began.

    The notebook keeps its own GPUs. `server` is what the job runs, if it is a server.

    Raises:
        UsageError: before anything is asked for.
        BrokerError: when the broker refuses; nothing is left behind.
    """
    env = environment.read()
    broker = BrokerClient.for_notebook(env)
    validated = validate_detached(
        options, cell=cell, env=env, broker=broker, user_set=environment.find_changes(before, os.environ)
    )
    options = replace(options, after=None if options.after is None else find_predecessor(broker, options.after))
    run = run_folder.open_run(env.home, run_folder.new_run_id())
    folders = _write(validated, env, run, exchange)
    try:
        jobs = request_jobs(validated, broker, run, env, after=options.after, server=server)
    except BaseException:
        _withdraw(broker, run, folders)
        raise
    job = jobs[0]
    return Submitted(
        run_id=run.run_id,
        job_id=job.id,
        folder=run.root,
        state=job.state,
        position=job.position,
        waiting_for=job.waiting_for,
        holdings=list_holdings(broker, jobs, validated.plan.demand, server=None) if job.state == models.WAITING else (),
        tasks=() if options.array is None else tuple(task.run_id for task in jobs),
    )


def find_predecessor(broker: BrokerClient, text: str) -> str:
    """Return the run id that `--after` names: of an own detached job or array, or a unique end of one.

    Raises:
        UsageError: There is none, or there are several.
    """
    jobs = [job for job in broker.list_jobs(ended=True) if job.detached]
    ids = {run for job in jobs for run in (job.run_id, job.array) if run is not None}
    matches = [text] if text in ids else sorted(run for run in ids if run.endswith(text))
    if len(matches) != 1:
        found = f"several jobs have this end: {', '.join(matches[:5])}" if matches else "you have no such job"
        raise UsageError(f"--after {text}: {found}. %gpu_status lists them.")
    return matches[0]


def build_dry_run(
    options: LaunchOptions, *, cell: str | None, before: Mapping[str, str], exchange: ExchangeFiles | None = None
) -> DryRunReport:
    """Return what `submit_from_notebook` would ask for and run.

    Raises:
        UsageError, BrokerError: as `submit_from_notebook` does.
    """
    env = environment.read()
    broker = BrokerClient.for_notebook(env, retry_limit_s=_DRY_RUN_RETRY_LIMIT_S)
    user_set = environment.find_changes(before, os.environ)
    validated = validate_detached(options, cell=cell, env=env, broker=broker, user_set=user_set)
    run = run_folder.open_run(env.home, dry_run.RUN)
    recorder = dry_run.RequestRecorder()
    request_jobs(validated, recorder, run, env, after=options.after)
    report = dry_run.report_new_workers(validated, broker, run, recorder.body)
    return dry_run.complete_report(replace(report, manifest=build_manifest(validated)), run, env.home, exchange)


def validate_detached(
    options: LaunchOptions, *, cell: str | None, env: Environment, broker: BrokerClient, user_set: Mapping[str, str]
) -> ValidatedRequest:
    """Return the request, checked as for a launch in which this notebook's container takes no part.

    Raises:
        UsageError: for a request that can never be met.
    """
    check_array(options)
    check_guests(options)
    if missing := missing_broker(env):
        raise UsageError(f"--detach needs the broker: {missing}.")
    try:
        cwd = Path.cwd()
    except FileNotFoundError:
        raise UsageError("This notebook's folder does not exist any more; use %cd to go to another.") from None
    # The notebook's GPUs take no part, and its node is not excluded.
    elsewhere = replace(env, gpu_uuids=(), node="")
    return validate(LaunchRequest(options=options, cell=cell, cwd=cwd, env=elsewhere, environ=user_set), broker)


def build_manifest(validated: ValidatedRequest) -> job_manifest.JobManifest:
    """Return the job's manifest."""
    request = validated.request
    options = request.options if request.cell is not None else replace(request.options, script=validated.script)
    return job_manifest.JobManifest(
        name=build_name(request.options),
        words=command.format_words(options),
        folder=below_home(request.cwd, request.env.home),
        environ=dict(request.environ),
        # Any variable that was set in the notebook may be a token.
        secret_names=tuple(sorted(request.environ)),
        cell=request.cell,
    )


def build_name(options: LaunchOptions) -> str:
    """Return the job's name for people: its script's."""
    return (Path(options.script).name or "cell")[:_MOST_NAME]


def below_home(path: Path, home: Path) -> str:
    """Return a folder as a manifest has it: below the home, or the whole path where all nodes have it."""
    for start in (path, path.resolve()):
        for base in (home, home.resolve()):
            if start.is_relative_to(base):
                return str(start.relative_to(base)) if start != base else ""
    return str(path.resolve())


def _write(
    validated: ValidatedRequest, env: Environment, run: run_folder.RunFolder, exchange: ExchangeFiles | None
) -> list[run_folder.RunFolder]:
    """Write the folder of the job, or of each task of an array; return them."""
    array, manifest = validated.request.options.array, build_manifest(validated)
    manifests = (
        {run.run_id: manifest} if array is None else job_files.split_manifest(manifest, run.run_id, array.indexes)
    )
    folders: list[run_folder.RunFolder] = []
    try:
        python = environment.find_own_interpreter(env.home)
        for run_id, task_manifest in manifests.items():
            folder = run_folder.create_run(env.home, run_id)
            folders.append(folder)
            for name, data in job_files.build_files(task_manifest, python=python).items():
                run_folder.write_private(folder.root / name, data)
            if exchange is not None:
                exchange.write(folder.exchange)
    except OSError as error:
        _remove(folders)
        raise GpuLaunchError(f"The job's folder {run.root} cannot be written: {error.strerror}.") from None
    return folders


def _remove(folders: Iterable[run_folder.RunFolder]) -> None:
    for folder in folders:
        shutil.rmtree(folder.root, ignore_errors=True)


def _withdraw(broker: BrokerClient, run: run_folder.RunFolder, folders: Iterable[run_folder.RunFolder]) -> None:
    """Remove the folders and the jobs: the broker may have accepted them although its answer did not arrive."""
    with contextlib.suppress(GpuLaunchError):
        for job in broker.list_jobs():
            if run.run_id in (job.run_id, job.array):
                broker.delete_job(job.id)
    _remove(folders)


def request_jobs(
    validated: ValidatedRequest,
    broker: BrokerClient,
    run: run_folder.RunFolder,
    env: Environment,
    *,
    after: str | None = None,
    server: JobServer | None = None,
) -> list[models.Job]:
    """Ask the broker for the job, or the tasks of an array; a `RequestRecorder` only keeps the request."""
    plan, options = validated.plan, validated.request.options
    request: dict[str, Any] = {
        "run_id": run.run_id,
        "nnodes": plan.nnodes,
        "min_nnodes": plan.least_nnodes if plan.is_elastic else None,
        "nproc_per_node": plan.nproc_per_node,
        "server": env.server,
        "exclude_nodes": (),
        "demand": plan.demand,
        "batch": True,
        "detached": True,
        "image": env.image,
        "name": build_name(options) if server is None else server.name,
        "after": after,
        "max_retries": options.retries,
    }
    if server is not None:
        request |= {"port": server.port, "port_users": server.users, "sleeps": server.sleeps}
    if options.array is None:
        return [broker.create_job(**request)]
    return broker.create_array(count=len(options.array.indexes), max_running=options.array.limit, **request)
