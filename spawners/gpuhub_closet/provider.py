"""The practice closet as a provider of nodes for `gpuhub up` and `gpuhub down`, with its supervised programs."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from gpuhub.broker.db.stopped_nodes import keep_broker_stopped, record_stopped_nodes
from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.console import StepReport
from gpuhub.ops.deploy import programs
from gpuhub.ops.deploy.programs import Program, Supervisor
from gpuhub_closet import cluster_file, docker_daemons, layouts, lifecycle
from gpuhub_closet.slurm import slurm_daemons, slurm_setup
from gpuhub_closet.topology import ClosetPlan


class PracticeCloset:
    """The provider of the practice closet's nodes; see `gpuhub.ops.deploy.cluster_choice.ClusterProvider`."""

    title = "Practice closet"

    def find_running_backend(self, supervised: Collection[str]) -> str | None:
        if slurm_daemons.SLURMCTLD in supervised:
            return "slurm"
        return (
            "builtin"
            if set(supervised) - {programs.PROXY, programs.BROKER, programs.HUB, programs.PROMETHEUS}
            else None
        )

    def write_cluster_file(
        self, paths: Paths, backend: str, variant: str | None, *, real_gpu: str | None = None, is_running: bool
    ) -> Path:
        plan = layouts.choose_layout(paths, variant, real_gpu=real_gpu, is_running=is_running)
        return cluster_file.write_cluster_file(plan, paths, backend)

    def start(
        self,
        paths: Paths,
        supervisor: Supervisor,
        cluster: ClusterSettings,
        services: Sequence[Program],
        report: StepReport,
    ) -> None:
        closet = layouts.find_plan(paths)
        nodes = [node.name for node in closet.nodes]
        daemons = build_docker_programs(paths, nodes)
        queue = _prepare_slurm(closet, paths, cluster) if cluster.engine == "slurm" else []
        with report.step(f"Practice closet: {len(nodes)} nodes, each with its own Docker daemon"):
            lifecycle.prepare_closet(closet, paths)
            _record_stopped_nodes(closet, paths)
            supervisor.start([*daemons, *queue, *services])
            for program in daemons:
                supervisor.ensure_started(program.name)
            docker_daemons.wait_ready(closet, paths)
        if queue:
            with report.step(f"Practice closet's Slurm: slurmctld, and a slurmd on each of {len(nodes)} nodes"):
                for program in queue:
                    supervisor.ensure_started(program.name)
                slurm_daemons.wait_ready(closet, paths)

    def ensure_down(self, paths: Paths, *, purge: bool) -> None:
        lifecycle.ensure_down(layouts.build_largest_plan(paths.instance), paths, purge=purge)

    def find_leftovers(self, paths: Paths) -> list[str]:
        return lifecycle.find_leftovers(layouts.build_largest_plan(paths.instance), paths)


def _record_stopped_nodes(closet: ClosetPlan, paths: Paths) -> None:
    """Let the next broker know which nodes have no process, hence no container, before their daemons start."""
    # A broker that runs reconciles the nodes itself.
    with suppress(SetupError), keep_broker_stopped(paths):
        stopped = [node.name for node in closet.nodes if not docker_daemons.find_processes(closet, node)]
        record_stopped_nodes(paths, dict.fromkeys(stopped))


def _prepare_slurm(closet: ClosetPlan, paths: Paths, cluster: ClusterSettings) -> list[Program]:
    has_rest = cluster.slurm.api == "rest"
    slurm_setup.prepare_slurm(closet, paths, cluster.users, has_rest=has_rest)
    conf = slurm_setup.build_slurm_config(closet, paths).conf
    return build_slurm_programs(paths, conf, [node.name for node in closet.nodes], has_rest=has_rest)


def build_docker_programs(paths: Paths, nodes: Sequence[str]) -> list[Program]:
    """Return the nodes' Docker daemons; they stop after every program that uses them."""
    return [
        Program(
            name=node,
            command=(_command(), "node", "--instance", paths.instance, node),
            directory=paths.state,
            priority=50,
            stop_wait_s=30,
        )
        for node in nodes
    ]


def build_slurm_programs(paths: Paths, conf: Path, nodes: Sequence[str], *, has_rest: bool = False) -> list[Program]:
    """Return Slurm's daemons in the order of their start: munged, slurmctld, and a slurmd for each node."""
    daemons = {"munged": "munged", "slurmctld": "slurmctld", **{f"slurmd-{node}": node for node in nodes}}
    if has_rest:
        daemons["slurmrestd"] = "slurmrestd"
    return [
        Program(
            name=name,
            command=(_command(), "slurm", "--instance", paths.instance, daemon),
            directory=paths.state,
            environment={"SLURM_CONF": str(conf)},
            # They stop before the Docker daemons do, and munged is the last of them.
            priority=60 + number,
        )
        for number, (name, daemon) in enumerate(daemons.items())
    ]


def _command() -> str:
    return str(Path(sys.executable).with_name("gpuhub-closet"))
