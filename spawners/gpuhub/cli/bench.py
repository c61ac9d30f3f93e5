"""`gpuhub bench`: how fast the nodes' GPUs and the network between them are, for predictions and the page."""

from __future__ import annotations

from pathlib import Path

import click

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.cli import tables
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.deployment import load_settings
from gpuhub.cli.options import BrokerRunner, cluster_file_option, instance_option, pass_broker
from gpuhub.common.paths import Paths


@click.command("bench", short_help="Measure the nodes' GPUs and the network between them.")
@instance_option
@cluster_file_option
@click.option("--user", metavar="NAME", help="Whose job measures; default: the first of [users] allowed.")
@click.option(
    "--node", "nodes", multiple=True, metavar="NAME", help="A node that takes part; default: all with a free GPU."
)
@click.option("--last", is_flag=True, help="Show what was last measured, and measure nothing.")
@pass_broker
def bench(
    broker: BrokerRunner, paths: Paths, cluster_file: Path, *, user: str | None, nodes: tuple[str, ...], last: bool
) -> None:
    """Measure one GPU of each node, how fast it reads the user's home, and the all-reduces between the nodes.

    It takes about a minute. The page of GPUs shows the figures, and `%gpu_launch --predict` uses them for all users who
    have not measured themselves. What else runs meanwhile is measured as well.
    """
    from gpuhub.ops.console import StepReport
    from gpuhub.ops.validation.bench import measure_cluster
    from gpuhub.ops.validation.plan import choose_user

    if last and (user or nodes):
        raise click.UsageError("--last measures nothing: --user and --node do not go with it")

    async def run(administrator: AsyncBrokerClient, console: AdminConsole) -> None:
        if last:
            console.write(tables.format_bench(await administrator.bench(), console.width))
            return
        cluster = load_settings(cluster_file, paths)
        measured = await measure_cluster(
            cluster,
            paths,
            choose_user(cluster.users, user),
            nodes,
            StepReport(),
            administrator=administrator,
        )
        console.write(f"\n{tables.format_bench(measured, console.width)}")

    broker.run("bench", paths, run)
