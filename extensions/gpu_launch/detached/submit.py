"""`%gpu_launch --detach`: from a notebook to a job that runs without it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

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
from gpu_launch.launch.plan import missing_broker
from gpu_launch.launch.request import LaunchRequest, ValidatedRequest, validate
from gpu_launch.options import command
from gpu_launch.options.definition import LaunchOptions

_MOST_NAME = 80
_DRY_RUN_PATIENCE_S = 3.0  # seconds for a broker that does not answer


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


def submit_from_notebook(
    options: LaunchOptions, *, cell: str | None = None, before: Mapping[str, str], exchange: ExchangeFiles | None = None
) -> Submitted:
    """Submit a launch as a detached job. `before` is the environment when the notebook began.

    The notebook keeps its own GPUs.

    Raises:
        UsageError: before anything is asked for.
        BrokerError: when the broker refuses; nothing is left behind.
    """
    env = environment.read()
    broker = BrokerClient.for_notebook(env)
    validated = validate_detached(
        options, cell=cell, env=env, broker=broker, user_set=environment.find_changes(before, os.environ)
    )
    run = _write(validated, env, exchange)
    try:
        job = request_job(validated, broker, run, env)
    except BaseException:
        _withdraw(broker, run)
        raise
    return Submitted(
        run_id=run.run_id,
        job_id=job.id,
        folder=run.root,
        state=job.state,
        position=job.position,
        waiting_for=job.waiting_for,
        holdings=list_holdings(broker, [job], validated.plan.demand, server=None)
        if job.state == models.WAITING
        else (),
    )


def build_dry_run(
    options: LaunchOptions, *, cell: str | None, before: Mapping[str, str], exchange: ExchangeFiles | None = None
) -> DryRunReport:
    """Return what `submit_from_notebook` would ask for and run.

    Raises:
        UsageError, BrokerError: as `submit_from_notebook` does.
    """
    env = environment.read()
    broker = BrokerClient.for_notebook(env, patience_s=_DRY_RUN_PATIENCE_S)
    user_set = environment.find_changes(before, os.environ)
    validated = validate_detached(options, cell=cell, env=env, broker=broker, user_set=user_set)
    run = run_folder.open_run(env.home, dry_run.RUN)
    recorder = dry_run.RequestRecorder()
    request_job(validated, recorder, run, env)
    report = dry_run.report_new_workers(validated, broker, run, recorder.body)
    return dry_run.complete_report(replace(report, manifest=build_manifest(validated)), run, env.home, exchange)


def validate_detached(
    options: LaunchOptions, *, cell: str | None, env: Environment, broker: BrokerClient, user_set: Mapping[str, str]
) -> ValidatedRequest:
    """Return the request, checked as for a launch in which this notebook's container takes no part.

    Raises:
        UsageError: for a request that can never be met.
    """
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


def _write(validated: ValidatedRequest, env: Environment, exchange: ExchangeFiles | None) -> run_folder.RunFolder:
    run = run_folder.create_run(env.home)
    try:
        for name, data in job_files.build_files(build_manifest(validated)).items():
            run_folder.write_private(run.root / name, data)
        if exchange is not None:
            exchange.write(run.exchange)
    except OSError as error:
        shutil.rmtree(run.root, ignore_errors=True)
        raise GpuLaunchError(f"The job's folder {run.root} cannot be written: {error.strerror}.") from None
    return run


def _withdraw(broker: BrokerClient, run: run_folder.RunFolder) -> None:
    """Remove the folder and the job: the broker may have accepted it although its answer did not arrive."""
    with contextlib.suppress(GpuLaunchError):
        for job in broker.list_jobs():
            if job.run_id == run.run_id:
                broker.delete_job(job.id)
    shutil.rmtree(run.root, ignore_errors=True)


def request_job(
    validated: ValidatedRequest, broker: BrokerClient, run: run_folder.RunFolder, env: Environment
) -> models.Job:
    """Ask the broker for the job; a `RequestRecorder` only keeps the request."""
    plan = validated.plan
    return broker.create_job(
        run_id=run.run_id,
        nnodes=plan.nnodes,
        min_nnodes=plan.least_nnodes if plan.is_elastic else None,
        nproc_per_node=plan.nproc_per_node,
        server=env.server,
        exclude_nodes=(),
        demand=plan.demand,
        batch=True,
        detached=True,
        name=build_name(validated.request.options),
    )
