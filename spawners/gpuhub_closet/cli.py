"""The command `gpuhub-closet`, which runs the practice closet's daemons in the foreground; a supervisor calls it.

`gpuhub closet-node` and `gpuhub closet-slurm` are the same commands, found by their entry points.
"""

from __future__ import annotations

import os

import click

from gpuhub.common.errors import GpuhubError, SetupError
from gpuhub.common.paths import DEFAULT_INSTANCE, Paths
from gpuhub.ops.deploy.programs import Supervisor
from gpuhub_closet import docker_daemons, layouts
from gpuhub_closet.slurm import slurm_daemons, slurm_setup

_instance_option = click.option(
    "--instance", default=DEFAULT_INSTANCE, show_default=True, help="Name of the gpuhub instance."
)


@click.group()
def cli() -> None:
    """Run the daemons of a practice closet."""


@cli.command("node", short_help="Run the Docker daemon of a practice closet's node.")
@_instance_option
@click.option("--cluster-file", hidden=True, help="Has no effect.")
@click.argument("node", metavar="NODE")
def run_node(instance: str, cluster_file: str | None, node: str) -> None:
    """Run the Docker daemon of a practice closet's NODE, such as rig1, in the foreground."""
    closet = layouts.find_plan(Paths(instance))
    names = [closet_node.name for closet_node in closet.nodes]
    if node not in names:
        raise SetupError(f"{node!r} is not a node of the practice closet: there are {', '.join(names)}")
    command = docker_daemons.build_foreground_command(closet, closet.node(node), Paths(instance))
    os.execvp(command[0], command)  # noqa: S606 - the daemon replaces this process under supervisord


@cli.command("slurm", short_help="Run a daemon of a practice closet's Slurm.")
@_instance_option
@click.option("--cluster-file", hidden=True, help="Has no effect.")
@click.argument("daemon", metavar="DAEMON")
def run_slurm_daemon(instance: str, cluster_file: str | None, daemon: str) -> None:
    """Run one daemon of a practice closet's Slurm in the foreground.

    DAEMON is munged, slurmctld, or a node's name for its slurmd.
    """
    closet, paths = layouts.find_plan(Paths(instance)), Paths(instance)
    drop_jobs = daemon == slurm_daemons.SLURMCTLD and slurm_setup.consume_drop_marker(paths)
    command = slurm_daemons.build_command(closet, paths, daemon, drop_jobs=drop_jobs)
    os.execvp(command[0], command)  # noqa: S606 - the daemon replaces this process under supervisord


@cli.command("power")
@_instance_option
@click.argument("action", type=click.Choice(["on", "off", "cut"]))
@click.argument("node", metavar="NODE")
def switch_power(instance: str, action: str, node: str) -> None:
    """Start a practice closet's NODE, shut it down, or cut its power: then all of its processes end at once."""
    supervisor = Supervisor(Paths(instance))
    if not supervisor.is_running() or node not in supervisor.states():
        raise SetupError(f"{node!r} is not a node of a practice closet that runs")
    switch = {"on": supervisor.ensure_started, "off": supervisor.stop, "cut": supervisor.kill}
    switch[action](node)


def main() -> None:
    """Run one command; an expected failure is one line on standard error and exit status 1."""
    try:
        cli(prog_name="gpuhub-closet")
    except GpuhubError as error:
        click.echo(f"gpuhub-closet: {error}", err=True)
        raise SystemExit(1) from None
