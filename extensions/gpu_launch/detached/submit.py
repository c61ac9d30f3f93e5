"""`%gpu_launch --detach`: from a notebook to a job that goes on without it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_launch import environment, order, runs, wire
from gpu_launch.broker import Broker
from gpu_launch.detached import folder, words
from gpu_launch.environment import Environment
from gpu_launch.errors import GpuLaunchError, UsageError
from gpu_launch.exchange import Exchange
from gpu_launch.options import Options
from gpu_launch.plan import missing_broker
from gpu_launch.request import Checked, Request, check

_MOST_NAME = 80


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A job that the broker has taken."""

    run_id: str
    job_id: str
    folder: Path
    #: `waiting`, or already further.
    state: str
    #: Place in the queue from 1; None unless it waits.
    position: int | None
    #: What it waits for, one line for a person.
    waiting_for: str | None


def submit_from_notebook(
    options: Options, *, cell: str | None = None, before: Mapping[str, str], exchange: Exchange | None = None
) -> Submitted:
    """Hand a launch to the cluster. `before` is the environment when the notebook began.

    The notebook's own GPUs stay with it. Raises UsageError before anything is asked for, and BrokerError when the
    broker refuses; nothing is left behind then.
    """
    env = environment.read()
    broker = Broker.inside(env)
    checked = examine(options, cell=cell, env=env, broker=broker, user_set=environment.changed(before, os.environ))
    run = _write(checked, env, exchange)
    try:
        job = ask(checked, broker, run, env)
    except BaseException:
        _take_back(broker, run)
        raise
    return Submitted(
        run_id=run.run_id,
        job_id=job.id,
        folder=run.root,
        state=job.state,
        position=job.position,
        waiting_for=job.waiting_for,
    )


def examine(
    options: Options, *, cell: str | None, env: Environment, broker: Broker, user_set: Mapping[str, str]
) -> Checked:
    """What can be refused before anything is asked for, as for a launch all of whose nodes are others."""
    if missing := missing_broker(env):
        raise UsageError(f"--detach needs the broker: {missing}.")
    try:
        cwd = Path.cwd()
    except FileNotFoundError:
        raise UsageError("This notebook's folder does not exist any more; use %cd to go to another.") from None
    # Neither the notebook's GPUs take part, nor is its node left out.
    elsewhere = replace(env, gpu_uuids=(), node="")
    return check(Request(options=options, cell=cell, cwd=cwd, env=elsewhere, environ=user_set), broker)


def build_order(checked: Checked) -> order.Order:
    """The order of a checked request. Pure."""
    request = checked.request
    options = request.options if request.cell is not None else replace(request.options, script=checked.script)
    return order.Order(
        name=build_name(request.options),
        words=words.build(options),
        folder=below_home(request.cwd, request.env.home),
        environ=dict(request.environ),
        cell=request.cell,
    )


def build_name(options: Options) -> str:
    """For people."""
    return (Path(options.script).name or "cell")[:_MOST_NAME]


def below_home(path: Path, home: Path) -> str:
    """A folder as an order has it: below the home, or as it is where all nodes have it."""
    for start in (path, path.resolve()):
        for base in (home, home.resolve()):
            if start.is_relative_to(base):
                return str(start.relative_to(base)) if start != base else ""
    return str(path.resolve())


def _write(checked: Checked, env: Environment, exchange: Exchange | None) -> runs.RunFolder:
    run = runs.create(env.home)
    try:
        for name, data in folder.files(build_order(checked)).items():
            runs.write_private(run.root / name, data)
        if exchange is not None:
            exchange.write(run.exchange)
    except OSError as error:
        shutil.rmtree(run.root, ignore_errors=True)
        raise GpuLaunchError(f"The job's folder {run.root} cannot be written: {error.strerror}.") from None
    return run


def _take_back(broker: Broker, run: runs.RunFolder) -> None:
    """Nothing is left, the job neither: the broker may have taken it without our seeing the answer."""
    with contextlib.suppress(GpuLaunchError):
        for job in broker.jobs():
            if job.run_id == run.run_id:
                broker.delete_job(job.id)
    shutil.rmtree(run.root, ignore_errors=True)


def ask(checked: Checked, broker: Broker, run: runs.RunFolder, env: Environment) -> wire.Job:
    """Ask the broker for it; or only write down what it would be asked, see `dry_run`."""
    plan = checked.plan
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
        name=build_name(checked.request.options),
    )
