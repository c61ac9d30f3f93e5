"""The user's own jobs: which there are, and their end."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_launch.broker import models
from gpu_launch.broker.client import BrokerClient, build_broker
from gpu_launch.environment import Environment
from gpu_launch.errors import BrokerError, UsageError


def list_own_jobs(broker: BrokerClient, env: Environment) -> list[models.Job]:
    """Return the user's jobs that have not ended: administrators get the jobs of all users."""
    return [job for job in broker.list_jobs() if job.owner in ("", env.user)]


def has_job(env: Environment, run_id: str) -> bool:
    """Return whether the broker has a job of that run; False if it does not answer."""
    broker = build_broker(env)
    try:
        return broker is not None and any(job.run_id == run_id for job in list_own_jobs(broker, env))
    except BrokerError:
        return False


def cancel_jobs(env: Environment, run: str) -> str:
    """End the job of that run (its id, or the end of it), or `all` jobs; return a text with the result.

    Raises:
        UsageError: There is no broker, or not exactly one such job.
    """
    broker = build_broker(env)
    if broker is None:
        raise UsageError("This server has no broker, so there is no job.")
    jobs = list_own_jobs(broker, env)
    matches = jobs if run == "all" else [job for job in jobs if run in (job.run_id, job.id)]
    array = [job for job in jobs if job.array is not None and (job.array == run or job.array.endswith(run))]
    if not matches and len({job.array for job in array}) == 1:
        return _cancel(broker, array)
    matches = matches or [job for job in jobs if job.run_id.endswith(run)]
    if run != "all" and len(matches) != 1:
        names = ", ".join(job.run_id for job in (matches or jobs)) or "none"
        raise UsageError(f"{run} is {'several jobs' if matches else 'no job'} of yours; there are: {names}.")
    return _cancel(broker, matches) or "You have no job.\n"


def _cancel(broker: BrokerClient, jobs: Sequence[models.Job]) -> str:
    for job in jobs:
        broker.delete_job(job.id)
    return "".join(f"{job.run_id} ends; it was {job.state}\n" for job in jobs)
