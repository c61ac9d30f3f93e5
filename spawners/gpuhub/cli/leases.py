"""`gpuhub lease`: list, why, extend, end and force."""

from __future__ import annotations

from collections.abc import Sequence

import click

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.schemas import LeaseState, LeaseView
from gpuhub.cli import tables
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.options import SPAN, BrokerRunner, OrderedGroup, instance_option, pass_broker, yes_option
from gpuhub.common.errors import InvalidRequest, NotFound
from gpuhub.common.paths import Paths


@click.group("lease", cls=OrderedGroup)
def lease_group() -> None:
    """Leases: list, why, extend, end, force. LEASE is an id, or the beginning of one."""


lease_argument = click.argument("prefix", metavar="LEASE")


@lease_group.command("list")
@instance_option
@click.option("--owner", help="Only this user's.")
@pass_broker
def list_leases(broker: BrokerRunner, paths: Paths, owner: str | None) -> None:
    """Show every lease that has not ended."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        leases = await client.leases(**({} if owner is None else {"owner": owner}))
        queue = [entry for entry in (await client.cluster()).queue if owner in {None, entry.owner}]
        console.write(tables.format_leases(leases, queue, console.now, console.width))

    broker.run("lease list", paths, run)


@lease_group.command("why")
@instance_option
@lease_argument
@pass_broker
def why(broker: BrokerRunner, paths: Paths, prefix: str) -> None:
    """Show why a request waits, and how much time each of its demands costs."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        lease = find_lease(await client.leases(), prefix)
        console.write(tables.format_why(await client.why(lease.id), console.now))

    broker.run("lease why", paths, run)


@lease_group.command("extend")
@instance_option
@lease_argument
@click.argument("span", type=SPAN, metavar="SPAN")
@pass_broker
def extend(broker: BrokerRunner, paths: Paths, prefix: str, span: int) -> None:
    """Let a lease end SPAN from now, such as 2h."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        lease = find_lease(await client.leases(), prefix)
        extended = await client.extend(lease.id, span)
        until = tables.format_when(extended.expires_at, console.now, none="its owner stops it")
        console.write(f"{_describe(extended)} continues until {until}")

    broker.run("lease extend", paths, run)


@lease_group.command("end")
@instance_option
@lease_argument
@yes_option
@pass_broker
def end(broker: BrokerRunner, paths: Paths, prefix: str, yes: bool) -> None:
    """End a lease; its containers are removed."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        lease = find_lease(await client.leases(), prefix)
        if not yes:
            console.confirm(f"End {_describe(lease)}? What runs in it is stopped.")
        ended = await client.release(lease.id)
        console.write(f"{_describe(ended)} is {ended.state.value}")

    broker.run("lease end", paths, run)


@lease_group.command("force")
@instance_option
@lease_argument
@yes_option
@pass_broker
def force(broker: BrokerRunner, paths: Paths, prefix: str, yes: bool) -> None:
    """Free a lease's GPUs without proof that its containers are gone."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        lease = find_lease(await client.leases(), prefix)
        if lease.state not in {LeaseState.RELEASING, LeaseState.QUARANTINED}:
            raise InvalidRequest(
                f"{_describe(lease)} is {lease.state.value}: only a lease that was ended can be forced"
            )
        if not yes:
            console.write(
                f"{_describe(lease)} is {lease.state.value}: there is no proof that its containers on "
                f"{', '.join(lease.nodes)} are gone.\nIf you force it, its GPUs are given to others at once. If a "
                "container still runs, two users then share\na GPU without knowing. Force it only after you have seen "
                "that the machine is off or the container is gone."
            )
            console.confirm("Force it?")
        ended = await client.force(lease.id)
        console.write(f"{_describe(ended)} is {ended.state.value}")

    broker.run("lease force", paths, run)


def find_lease(leases: Sequence[LeaseView], prefix: str) -> LeaseView:
    """Return the one lease whose id begins with the prefix.

    Raises:
        NotFound: No lease has such an id.
        InvalidRequest: Several have.
    """
    matches = [lease for lease in leases if prefix and lease.id.startswith(prefix)]
    if not matches:
        raise NotFound(f"no lease that has not ended begins with {prefix!r}; `gpuhub lease list` shows them")
    if len(matches) > 1 and prefix not in {lease.id for lease in matches}:
        raise InvalidRequest(f"{prefix!r} is the beginning of {len(matches)} leases: write more of it")
    return min(matches, key=lambda lease: len(lease.id))


def _describe(lease: LeaseView) -> str:
    return f"lease {tables.shorten_id(lease.id)} of {lease.owner} ({tables.describe_purpose(lease)})"
