"""The practice closet's daemons under the supervisor: Docker's, and Slurm's where it is the engine."""

from __future__ import annotations

from collections.abc import Sequence

from gpuhub.closet import lifecycle, plan, slurm, slurm_daemons
from gpuhub.head import programs
from gpuhub.head.choice import Engine
from gpuhub.head.report import Report
from gpuhub.head.supervisor import Program, Supervisor
from gpuhub.paths import Paths
from gpuhub.settings import Cluster


def running_engine(supervisor: Supervisor) -> Engine | None:
    """What the practice closet of the instance runs with; None when none runs."""
    if not supervisor.is_running():
        return None
    kept = supervisor.states()
    if slurm_daemons.SLURMCTLD in kept:
        return "slurm"
    return "builtin" if set(kept) - {programs.PROXY, programs.BROKER, programs.HUB} else None


def start(paths: Paths, supervisor: Supervisor, cluster: Cluster, services: Sequence[Program], report: Report) -> None:
    """Have the closet's daemons run, and return when they answer; the services are only made known."""
    closet = plan.practice_plan(paths.instance)
    nodes = [node.name for node in closet.nodes]
    daemons = programs.build_closet_programs(paths, nodes)
    queue = _prepare_slurm(closet, paths, cluster) if cluster.engine == "slurm" else []
    with report.step(f"Practice closet: {len(nodes)} nodes, each with a Docker daemon of its own"):
        lifecycle.prepare(closet, paths)
        supervisor.start([*daemons, *queue, *services])
        for program in daemons:
            supervisor.ensure_started(program.name)
        lifecycle.wait_ready(closet, paths)
    if queue:
        with report.step(f"Practice closet's Slurm: slurmctld, and a slurmd on each of {len(nodes)} nodes"):
            for program in queue:
                supervisor.ensure_started(program.name)
            slurm_daemons.wait_ready(closet, paths)


def _prepare_slurm(closet: plan.Plan, paths: Paths, cluster: Cluster) -> list[Program]:
    has_rest = cluster.slurm.api == "rest"
    slurm.prepare(closet, paths, cluster.users, has_rest=has_rest)
    conf = slurm.build_files(closet, paths).conf
    return programs.build_slurm_programs(paths, conf, [node.name for node in closet.nodes], has_rest=has_rest)
