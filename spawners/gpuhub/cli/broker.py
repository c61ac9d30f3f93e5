"""Commands that are requests to the running broker: each runs with a client and the console."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import click

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.options import require_root
from gpuhub.common.paths import Paths
from gpuhub.ops.broker_connection import connect_to_broker

#: What a command does with the broker's client, and the console for its output.
BrokerAction = Callable[[AsyncBrokerClient, AdminConsole], Awaitable[None]]


class BrokerRunner:
    """Runs the actions of commands against the broker of an instance on this machine."""

    def run(self, name: str, paths: Paths, action: BrokerAction) -> None:
        """Run the action of the command `name` to its end.

        Raises:
            GpuhubError: The broker refused the request or does not answer.
        """
        require_root(name)
        asyncio.run(_run(paths, action))


async def _run(paths: Paths, action: BrokerAction) -> None:
    client = connect_to_broker(paths)
    try:
        await action(client, AdminConsole())
    finally:
        await client.close()


pass_broker = click.make_pass_decorator(BrokerRunner)
