"""`gpuhub node power`: on, off and status."""

from __future__ import annotations

import asyncio
import time

import click

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.schemas import NodeView, PowerView
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.nodes import find_node, name_argument
from gpuhub.cli.options import BrokerRunner, OrderedGroup, instance_option, pass_broker
from gpuhub.cli.tables import format_clock
from gpuhub.common.errors import InvalidRequest, Unavailable
from gpuhub.common.paths import Paths
from gpuhub.common.units import format_span

#: Maximum wait for a node to fall asleep or to wake; the broker gives up before, seconds.
_DEADLINE_S = 3900.0
_POLL_S = 1.0

no_wait_option = click.option("--no-wait", is_flag=True, help="Do not wait until it is done.")


@click.group("power", cls=OrderedGroup)
def power_group() -> None:
    """Wake nodes and put them to sleep: on, off, status."""


@power_group.command("on")
@instance_option
@name_argument
@no_wait_option
@pass_broker
def switch_on(broker: BrokerRunner, *, paths: Paths, name: str, no_wait: bool) -> None:
    """Wake the node NAME, also one that did not come up before."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        await _switch(client, console, name, on=True, waits=not no_wait)

    broker.run("node power on", paths, run)


@power_group.command("off")
@instance_option
@name_argument
@no_wait_option
@pass_broker
def switch_off(broker: BrokerRunner, *, paths: Paths, name: str, no_wait: bool) -> None:
    """Put the node NAME to sleep, unless something runs there.

    The queue wakes it again when it needs it; `gpuhub node cordon` keeps it from that.
    """

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        await _switch(client, console, name, on=False, waits=not no_wait)

    broker.run("node power off", paths, run)


@power_group.command("status")
@instance_option
@name_argument
@pass_broker
def status(broker: BrokerRunner, *, paths: Paths, name: str) -> None:
    """Show whether the node NAME is on, asleep or on its way."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        node = await find_node(client, name)
        console.write(describe_power(node, console))

    broker.run("node power status", paths, run)


def describe_power(node: NodeView, console: AdminConsole) -> str:
    """Return lines about a node's power.

    Raises:
        InvalidRequest: It stays on.
    """
    power = _require_power(node)
    lines = [f"{node.name} is {power.state} since {format_clock(power.since, console.now)}"]
    if power.usual_wake_s is not None:
        lines.append(f"usually up {format_span(power.usual_wake_s)} after it is woken")
    if power.error is not None:
        lines.append(power.error)
    if power.retry_at is not None:
        lines.append(
            f"not tried again before {format_clock(power.retry_at, console.now)}, or with `gpuhub node power on`"
        )
    return "\n".join(lines)


def _require_power(node: NodeView) -> PowerView:
    if node.power is None:
        raise InvalidRequest(f"node {node.name} stays on: cluster.toml has no power for it")
    return node.power


async def _switch(client: AsyncBrokerClient, console: AdminConsole, name: str, *, on: bool, waits: bool) -> None:
    """Switch a node, and wait for it."""
    await find_node(client, name)
    await _follow(client, console, await client.switch_power(name, on=on), waits=waits)


async def _follow(client: AsyncBrokerClient, console: AdminConsole, node: NodeView, *, waits: bool) -> None:
    """Write the state, and wait until it lasts.

    Raises:
        Unavailable: The node could not be switched.
    """
    began = time.monotonic()
    wanted = _require_power(node).state
    console.write(f"{node.name} is {'going to sleep' if wanted == 'stopping' else wanted}")
    while waits and node.power is not None and node.power.state in {"stopping", "waking"}:
        if time.monotonic() - began > _DEADLINE_S:
            raise Unavailable(f"node {node.name} is still {node.power.state}")
        await asyncio.sleep(_POLL_S)
        node = await find_node(client, node.name)
    power = _require_power(node)
    if not waits:
        return
    if power.error is not None:
        raise Unavailable(f"node {node.name}: {power.error}")
    console.write(f"{node.name} is {power.state} after {format_span(time.monotonic() - began)}")
