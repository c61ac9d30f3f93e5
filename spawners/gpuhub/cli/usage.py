"""`gpuhub usage` and `gpuhub events`."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import click

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.cli import tables
from gpuhub.cli.broker import BrokerRunner, pass_broker
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.options import instance_option
from gpuhub.common.errors import BrokerUnreachable
from gpuhub.common.paths import Paths

#: Between two polls for new events, seconds.
_FOLLOW_S = 1.0
#: The broker sends no more events at once.
_MAX_EVENTS = 1000


@click.command("usage")
@instance_option
@click.option("--owner", help="Only this user.")
@pass_broker
def usage(broker: BrokerRunner, paths: Paths, owner: str | None) -> None:
    """Show each user's GPUs, GPU hours and limits."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        console.write(tables.format_usage(await client.usage(owner), console.width))

    broker.run("usage", paths, run)


@click.command("events")
@instance_option
@click.option("-f", "--follow", is_flag=True, help="Wait for more, until Ctrl-C.")
@click.option("-n", "--lines", type=int, default=30, show_default=True, metavar="N", help="The last N.")
@pass_broker
def events(broker: BrokerRunner, paths: Paths, follow: bool, lines: int) -> None:
    """Show what the broker did and observed."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        after = await _write_events(client, console, after=None, limit=max(1, min(lines, _MAX_EVENTS)))
        while follow:
            await asyncio.sleep(_FOLLOW_S)
            with suppress(BrokerUnreachable):  # it restarts: the next poll returns the events of that time
                after = await _write_events(client, console, after=after, limit=_MAX_EVENTS)

    broker.run("events", paths, run)


async def _write_events(client: AsyncBrokerClient, console: AdminConsole, *, after: int | None, limit: int) -> int:
    """Write the events after a sequence number, and return the last number."""
    new_events = await client.events(after=after, limit=limit)
    for event in new_events:
        console.write(tables.format_event(event, console.now, console.width))
    return new_events[-1].seq if new_events else after or 0
