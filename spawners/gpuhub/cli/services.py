"""`gpuhub service`: list, restart and logs."""

from __future__ import annotations

import click

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.cli import tables
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.options import BrokerRunner, OrderedGroup, instance_option, pass_broker
from gpuhub.common.log_text import escape_lines
from gpuhub.common.paths import Paths


@click.group("service", cls=OrderedGroup)
def service_group() -> None:
    """Services of cluster.toml: list, restart, logs."""


@service_group.command("list")
@instance_option
@pass_broker
def list_services(broker: BrokerRunner, paths: Paths) -> None:
    """Show each service, where it runs, and why it does not."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        console.write(tables.format_services(await client.services(), console.width))

    broker.run("service list", paths, run)


@service_group.command("restart")
@instance_option
@click.argument("name", metavar="NAME")
@pass_broker
def restart(broker: BrokerRunner, paths: Paths, name: str) -> None:
    """Start a service in a new container; its data stays."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        service = await client.restart_service(name)
        console.write(f"The service {service.name} starts again on node {service.node}.")

    broker.run("service restart", paths, run)


@service_group.command("logs")
@instance_option
@click.argument("name", metavar="NAME")
@click.option("-n", "--lines", type=click.IntRange(1, 10_000), default=200, show_default=True, help="The last N.")
@pass_broker
def logs(broker: BrokerRunner, paths: Paths, name: str, lines: int) -> None:
    """Show the last output of a service."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        console.write(escape_lines(await client.read_service_log(name, lines)))

    broker.run("service logs", paths, run)
