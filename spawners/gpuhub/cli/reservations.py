"""`gpuhub reservation`: list, add and cancel."""

from __future__ import annotations

from datetime import timedelta

import click

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.schemas import ReservationRequest
from gpuhub.cli import tables
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.options import NAMES, SPAN, BrokerRunner, OrderedGroup, instance_option, parse_time, pass_broker
from gpuhub.common.errors import InvalidRequest, NotFound
from gpuhub.common.paths import Paths


@click.group("reservation", cls=OrderedGroup)
def reservation_group() -> None:
    """Reservations: list, add, cancel."""


@reservation_group.command("list")
@instance_option
@pass_broker
def list_reservations(broker: BrokerRunner, paths: Paths) -> None:
    """Show every reservation that has not ended."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        console.write(tables.format_reservations(await client.reservations(), console.now, console.width))

    broker.run("reservation list", paths, run)


@reservation_group.command("add")
@instance_option
@click.argument("name", metavar="NAME")
@click.option("--nodes", type=NAMES, default=(), metavar="A,B", help="All GPUs of these nodes.")
@click.option("--gpus", type=NAMES, default=(), metavar="A,B", help="These GPUs, by UUID.")
@click.option("--users", type=NAMES, default=(), metavar="A,B", help="For these users.")
@click.option("--groups", type=NAMES, default=(), metavar="A,B", help="For members of these groups.")
@click.option("--from", "begin", metavar="TIME", help='Such as 14:00 or "2026-12-01 08:00"; default: now.')
@click.option("--until", metavar="TIME", help="As --from.")
@click.option("--for", "span", type=SPAN, metavar="SPAN", help="Such as 8h, instead of --until.")
@pass_broker
def add(
    broker: BrokerRunner,
    *,
    paths: Paths,
    name: str,
    nodes: tuple[str, ...],
    gpus: tuple[str, ...],
    users: tuple[str, ...],
    groups: tuple[str, ...],
    begin: str | None,
    until: str | None,
    span: int | None,
) -> None:
    """Keep GPUs for some users in a time window named NAME, such as course."""
    if (until is None) == (span is None):
        raise click.UsageError("one of --until and --for is needed, and only one")

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        starts_at = console.now if begin is None else parse_time(begin, console.now)
        ends_at = starts_at + timedelta(seconds=span) if span else parse_time(until or "", console.now)
        try:
            request = ReservationRequest(
                name=name, nodes=nodes, gpus=gpus, users=users, groups=groups, starts_at=starts_at, ends_at=ends_at
            )
        except ValueError as error:
            raise InvalidRequest(f"this cannot be reserved: {error}") from None
        reservation = await client.reserve(request)
        first, last = (tables.format_clock(when, console.now) for when in (reservation.starts_at, reservation.ends_at))
        console.write(f"Reserved for {reservation.name} from {first} to {last}.")
        console.write(f"Cancel it with: gpuhub reservation cancel {tables.shorten_id(reservation.id)}")

    broker.run("reservation add", paths, run)


@reservation_group.command("cancel")
@instance_option
@click.argument("prefix", metavar="ID")
@pass_broker
def cancel(broker: BrokerRunner, paths: Paths, prefix: str) -> None:
    """Cancel a reservation; ID is its id, or the beginning of it."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        matches = [reservation for reservation in await client.reservations() if reservation.id.startswith(prefix)]
        if len(matches) != 1:
            raise NotFound(f"{prefix!r} is the beginning of {len(matches)} reservations, not of one")
        await client.cancel_reservation(matches[0].id)
        console.write(f"The reservation {matches[0].name} is cancelled")

    broker.run("reservation cancel", paths, run)
