"""What each of the administrator's commands does: ask the broker, and say it."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TextIO

from gpuhub.admin import tables
from gpuhub.admin.parser import parse_time
from gpuhub.broker.client import BrokerClient
from gpuhub.broker.schemas import CordonRequest, Lease, LeaseState, NodeView, ReservationRequest
from gpuhub.errors import BrokerUnreachable, InvalidRequest, NotFound
from gpuhub.quantities import format_span

#: Between two looks for new events, seconds.
_FOLLOW_S = 1.0


class Console:
    """The person at the terminal; without one, nothing is cut off and nothing is asked."""

    def __init__(self, output: TextIO | None = None, answers: TextIO | None = None) -> None:
        self._output = output or sys.stdout
        self._answers = answers or sys.stdin

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None where the output goes elsewhere."""
        return shutil.get_terminal_size().columns if self._output.isatty() else None

    @property
    def now(self) -> datetime:
        """The time here."""
        return datetime.now().astimezone()

    def say(self, text: str = "") -> None:
        """A line, or some."""
        self._output.write(f"{text}\n")
        self._output.flush()

    def confirm(self, question: str) -> None:
        """Return if the answer is yes.

        Raises:
            InvalidRequest: it is another one, or nobody can answer.
        """
        if not self._answers.isatty():
            raise InvalidRequest("nothing was changed: nobody is there to confirm it; with --yes it is done at once")
        self._output.write(f"{question} [y/N] ")
        self._output.flush()
        if self._answers.readline().strip().lower() not in {"y", "yes"}:
            raise InvalidRequest("nothing was changed")


async def run(options: argparse.Namespace, client: BrokerClient, console: Console) -> None:
    """Do what `options.action` names.

    Raises:
        GpuhubError: what the broker refused, or that it does not answer.
    """
    await ACTIONS[options.action](options, client, console)


# -- nodes ------------------------------------------------------------------------------------------------------------


async def list_nodes(options: argparse.Namespace, client: BrokerClient, console: Console) -> None:
    """`gpuhub node list`."""
    console.say(tables.format_nodes(await client.nodes(), console.width))


async def cordon_node(options: argparse.Namespace, client: BrokerClient, console: Console) -> None:
    """`gpuhub node cordon`: what runs there is shown first; it goes on, so nothing is asked."""
    await _check_node(client, options.name)
    await _show_runs(client, console, options.name)
    _tell_node(console, await client.change_node(options.name, "cordon", CordonRequest(reason=options.reason)))


async def drain_node(options: argparse.Namespace, client: BrokerClient, console: Console) -> None:
    """`gpuhub node drain`: what runs there is shown, and to be confirmed."""
    await _check_node(client, options.name)
    if await _show_runs(client, console, options.name) and not options.yes:
        when = f"in {format_span(options.grace)}" if options.grace else "at once"
        console.confirm(f"Drain {options.name}? All of this ends {when}.")
    request = CordonRequest(reason=options.reason, grace_s=options.grace)
    _tell_node(console, await client.change_node(options.name, "drain", request))


async def undrain_node(options: argparse.Namespace, client: BrokerClient, console: Console) -> None:
    """`gpuhub node undrain`."""
    _tell_node(console, await client.change_node(options.name, "undrain"))


async def _check_node(client: BrokerClient, name: str) -> None:
    nodes = [node.name for node in await client.nodes()]
    if name not in nodes:
        raise NotFound(f"there is no node {name!r}; there are: {', '.join(nodes)}")


async def _show_runs(client: BrokerClient, console: Console, node: str) -> bool:
    there = await client.leases(node=node)
    if not there:
        console.say(f"Nothing runs on {node}.")
        return False
    console.say(f"What runs on {node}:")
    console.say(tables.format_runs(there, node, console.now, console.width))
    console.say()
    return True


def _tell_node(console: Console, node: NodeView) -> None:
    message = node.message or ""
    told = message if message.startswith(node.state.value) else f"{node.state.value}{f': {message}' if message else ''}"
    console.say(f"{node.name} is {told}")


# -- leases -----------------------------------------------------------------------------------------------------------


async def list_leases(options: argparse.Namespace, client: BrokerClient, console: Console) -> None:
    """`gpuhub lease list`."""
    leases = await client.leases(**({} if options.owner is None else {"owner": options.owner}))
    queue = [entry for entry in (await client.cluster()).queue if options.owner in {None, entry.owner}]
    console.say(tables.format_leases(leases, queue, console.now, console.width))


async def show_why(options: argparse.Namespace, client: BrokerClient, console: Console) -> None:
    """`gpuhub lease why`."""
    lease = find_lease(await client.leases(), options.lease)
    console.say(tables.format_why(await client.why(lease.id), console.now))


async def extend_lease(options: argparse.Namespace, client: BrokerClient, console: Console) -> None:
    """`gpuhub lease extend`."""
    lease = find_lease(await client.leases(), options.lease)
    changed = await client.extend(lease.id, options.span)
    until = tables.format_when(changed.expires_at, console.now, none="whenever its owner stops it")
    console.say(f"{_name(changed)} goes on until {until}")


async def end_lease(options: argparse.Namespace, client: BrokerClient, console: Console) -> None:
    """`gpuhub lease end`."""
    lease = find_lease(await client.leases(), options.lease)
    if not options.yes:
        console.confirm(f"End {_name(lease)}? What runs in it is stopped.")
    ended = await client.release(lease.id)
    console.say(f"{_name(ended)} is {ended.state.value}")


async def force_lease(options: argparse.Namespace, client: BrokerClient, console: Console) -> None:
    """`gpuhub lease force`: with the warning what it means."""
    lease = find_lease(await client.leases(), options.lease)
    if lease.state not in {LeaseState.RELEASING, LeaseState.QUARANTINED}:
        raise InvalidRequest(f"{_name(lease)} is {lease.state.value}: only one that was ended can be forced")
    if not options.yes:
        console.say(
            f"{_name(lease)} is {lease.state.value}: nobody can prove that its containers on "
            f"{', '.join(lease.nodes)} are gone.\nForced, its GPUs are given to others at once. If a container still "
            "runs, two users then share\na GPU without knowing. Force it when you have seen the machine off, or the "
            "container gone."
        )
        console.confirm("Force it?")
    ended = await client.force(lease.id)
    console.say(f"{_name(ended)} is {ended.state.value}")


def find_lease(leases: Sequence[Lease], beginning: str) -> Lease:
    """The one lease whose id begins so.

    Raises:
        NotFound: there is none.
        InvalidRequest: there are several.
    """
    found = [lease for lease in leases if beginning and lease.id.startswith(beginning)]
    if not found:
        raise NotFound(f"no lease that has not ended begins with {beginning!r}; `gpuhub lease list` shows them")
    if len(found) > 1 and beginning not in {lease.id for lease in found}:
        raise InvalidRequest(f"{beginning!r} is the beginning of {len(found)} leases: write more of it")
    return min(found, key=lambda lease: len(lease.id))


def _name(lease: Lease) -> str:
    return f"lease {tables.short_id(lease.id)} of {lease.owner} ({tables.describe_purpose(lease)})"


# -- reservations, usage, events -------------------------------------------------------------------------------------


async def list_reservations(options: argparse.Namespace, client: BrokerClient, console: Console) -> None:
    """`gpuhub reservation list`."""
    console.say(tables.format_reservations(await client.reservations(), console.now, console.width))


async def add_reservation(options: argparse.Namespace, client: BrokerClient, console: Console) -> None:
    """`gpuhub reservation add`."""
    begin = console.now if options.begin is None else parse_time(options.begin, console.now)
    end = begin + timedelta(seconds=options.span) if options.span else parse_time(options.until, console.now)
    try:
        request = ReservationRequest(
            name=options.name,
            nodes=options.nodes,
            gpus=options.gpus,
            users=options.users,
            groups=options.groups,
            starts_at=begin,
            ends_at=end,
        )
    except ValueError as error:
        raise InvalidRequest(f"this cannot be reserved: {error}") from None
    made = await client.reserve(request)
    begin_text, end_text = (tables.format_clock(when, console.now) for when in (made.starts_at, made.ends_at))
    console.say(f"Reserved for {made.name} from {begin_text} to {end_text}.")
    console.say(f"Cancel it with: gpuhub reservation cancel {tables.short_id(made.id)}")


async def cancel_reservation(options: argparse.Namespace, client: BrokerClient, console: Console) -> None:
    """`gpuhub reservation cancel`."""
    found = [one for one in await client.reservations() if one.id.startswith(options.reservation)]
    if len(found) != 1:
        raise NotFound(f"{options.reservation!r} is the beginning of {len(found)} reservations, not of one")
    await client.cancel_reservation(found[0].id)
    console.say(f"The reservation {found[0].name} is cancelled")


async def show_usage(options: argparse.Namespace, client: BrokerClient, console: Console) -> None:
    """`gpuhub usage`."""
    console.say(tables.format_usage(await client.usage(options.owner), console.width))


async def show_events(options: argparse.Namespace, client: BrokerClient, console: Console) -> None:
    """`gpuhub events`, with `-f` until Ctrl-C."""
    after = await _tell_events(client, console, after=None, limit=max(1, min(options.lines, 1000)))
    while options.follow:
        await asyncio.sleep(_FOLLOW_S)
        with suppress(BrokerUnreachable):  # it is being restarted: what it did then comes with the next look
            after = await _tell_events(client, console, after=after, limit=1000)


async def _tell_events(client: BrokerClient, console: Console, *, after: int | None, limit: int) -> int:
    events = await client.events(after=after, limit=limit)
    for event in events:
        console.say(tables.format_event(event, console.now, console.width))
    return events[-1].seq if events else after or 0


Action = Callable[[argparse.Namespace, BrokerClient, Console], Awaitable[None]]
ACTIONS: dict[str, Action] = {
    "node-list": list_nodes,
    "node-cordon": cordon_node,
    "node-drain": drain_node,
    "node-undrain": undrain_node,
    "lease-list": list_leases,
    "lease-why": show_why,
    "lease-extend": extend_lease,
    "lease-end": end_lease,
    "lease-force": force_lease,
    "reservation-list": list_reservations,
    "reservation-add": add_reservation,
    "reservation-cancel": cancel_reservation,
    "usage": show_usage,
    "events": show_events,
}
