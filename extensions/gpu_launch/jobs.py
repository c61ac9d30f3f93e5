"""A person's jobs, as the broker has them, and their end."""

from __future__ import annotations

from gpu_launch.broker import Broker
from gpu_launch.environment import Environment
from gpu_launch.errors import BrokerError, UsageError
from gpu_launch.wire import Job

_PATIENCE_S = 3.0  # seconds for a broker that does not answer


def broker_of(env: Environment) -> Broker | None:
    """The broker of this server; None where there is none."""
    return Broker.inside(env, patience_s=_PATIENCE_S) if env.broker_url and env.token else None


def own_jobs(broker: Broker, env: Environment) -> list[Job]:
    """This person's jobs that have not ended: an administrator is told of everybody's."""
    return [job for job in broker.jobs() if job.owner in ("", env.user)]


def goes_on(env: Environment, run_id: str) -> bool:
    """Whether the broker has a job of that run; not where nobody can tell."""
    broker = broker_of(env)
    try:
        return broker is not None and any(job.run_id == run_id for job in own_jobs(broker, env))
    except BrokerError:
        return False


def cancel(env: Environment, run: str) -> str:
    """End the job of that run (its id, or the end of it), or all of them; what was done. Raises UsageError."""
    broker = broker_of(env)
    if broker is None:
        raise UsageError("This server has no broker, so there is no job.")
    jobs = own_jobs(broker, env)
    found = jobs if run == "all" else [job for job in jobs if run in (job.run_id, job.id)]
    found = found or [job for job in jobs if job.run_id.endswith(run)]
    if run != "all" and len(found) != 1:
        names = ", ".join(job.run_id for job in (found or jobs)) or "none"
        raise UsageError(f"{run} is {'several jobs' if found else 'no job'} of yours; there are: {names}.")
    for job in found:
        broker.delete_job(job.id)
    return "".join(f"{job.run_id} ends; it was {job.state}\n" for job in found) or "You have no job.\n"
