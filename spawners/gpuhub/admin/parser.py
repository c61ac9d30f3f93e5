"""The options of the administrator's commands, and times as administrators write them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import datetime, timedelta

from gpuhub.errors import InvalidRequest
from gpuhub.paths import DEFAULT_INSTANCE
from gpuhub.quantities import parse_span, parse_span_or_zero


def add_commands(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], run: Callable[..., None]
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Add `node`, `lease`, `reservation`, `usage` and `events`; each sets `run` and the name of its `action`.

    Returns:
        The group of `node`, for commands that the broker has no part in.
    """
    node = _group(commands, "node", "nodes: list, add, remove, firewall, cordon, drain, undrain")
    _add_node(node, run)
    _add_lease(_group(commands, "lease", "leases: list, why, extend, end, force"), run)
    _add_reservation(_group(commands, "reservation", "reservations: list, add, cancel"), run)
    usage = _command(commands, "usage", "usage", "what users have, had and may have", run)
    usage.add_argument("--owner", help="this user alone")
    events = _command(commands, "events", "events", "what the broker did, and found out", run)
    events.add_argument("-f", "--follow", action="store_true", help="wait for more, until Ctrl-C")
    events.add_argument("-n", "--lines", type=int, default=30, metavar="N", help="the last N; default: %(default)s")
    return node


def _group(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    parser = commands.add_parser(name, help=text, description=text)
    return parser.add_subparsers(required=True, metavar="ACTION")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    action: str,
    text: str,
    run: Callable[..., None],
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run, action=action)
    command.add_argument("--instance", default=DEFAULT_INSTANCE, help="default: %(default)s")
    return command


def _add_node(node: argparse._SubParsersAction[argparse.ArgumentParser], run: Callable[..., None]) -> None:
    _command(node, "list", "node-list", "every node: state, free GPUs, leases", run)
    for name, text in (
        ("cordon", "let a node take no new work; what runs there goes on"),
        ("drain", "let a node take no new work, and end what runs there"),
        ("undrain", "let a node take work again, after a cordon or a drain"),
    ):
        command = _command(node, name, f"node-{name}", text, run)
        command.add_argument("name", metavar="NAME", help="the node, such as rig1")
        if name != "undrain":
            command.add_argument("--reason", default="", help="shown to users")
        if name == "drain":
            command.add_argument(
                "--grace", type=_span_or_zero, default=1800, metavar="SPAN", help="until leases there end; default: 30m"
            )
            _add_yes(command)


def _add_lease(lease: argparse._SubParsersAction[argparse.ArgumentParser], run: Callable[..., None]) -> None:
    listing = _command(lease, "list", "lease-list", "every lease that has not ended", run)
    listing.add_argument("--owner", help="this user's alone")
    for name, text in (
        ("why", "why a request waits, and what each of its demands costs it"),
        ("extend", "more time, counted from now"),
        ("end", "end a lease; its containers are removed"),
        ("force", "free a lease's GPUs without proof that its containers are gone"),
    ):
        command = _command(lease, name, f"lease-{name}", text, run)
        command.add_argument("lease", metavar="LEASE", help="its id, or the beginning of it")
        if name == "extend":
            command.add_argument("span", type=_span, metavar="SPAN", help="such as 2h: it then ends so long from now")
        if name in {"end", "force"}:
            _add_yes(command)


def _add_reservation(group: argparse._SubParsersAction[argparse.ArgumentParser], run: Callable[..., None]) -> None:
    _command(group, "list", "reservation-list", "every reservation that has not ended", run)
    add = _command(group, "add", "reservation-add", "keep GPUs for some users in a window", run)
    add.add_argument("name", metavar="NAME", help="such as course")
    for option, what in (("nodes", "all GPUs of these nodes"), ("gpus", "these GPUs, by UUID")):
        add.add_argument(f"--{option}", type=_list, default=(), metavar="A,B", help=what)
    for option, what in (("users", "for these users"), ("groups", "for members of these groups")):
        add.add_argument(f"--{option}", type=_list, default=(), metavar="A,B", help=what)
    add.add_argument("--from", dest="begin", metavar="TIME", help='such as 14:00 or "2026-12-01 08:00"; default: now')
    end = add.add_mutually_exclusive_group(required=True)
    end.add_argument("--until", metavar="TIME", help="as --from")
    end.add_argument("--for", dest="span", type=_span, metavar="SPAN", help="such as 8h")
    cancel = _command(group, "cancel", "reservation-cancel", "cancel a reservation", run)
    cancel.add_argument("reservation", metavar="ID", help="its id, or the beginning of it")


def _add_yes(command: argparse.ArgumentParser) -> None:
    command.add_argument("-y", "--yes", action="store_true", help="do not ask")


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _span(text: str) -> int:
    return _checked(parse_span, text)


def _span_or_zero(text: str) -> int:
    return _checked(parse_span_or_zero, text)


def _checked(parse: Callable[[object], int], text: str) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_time(text: str, now: datetime) -> datetime:
    """A moment by this machine's clock: `14:00` (on the day of `now`) or `2026-12-01 08:00`.

    Raises:
        InvalidRequest: for anything else.
    """
    for form in ("%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d"):
        try:
            found = datetime.strptime(text, form)  # noqa: DTZ007 - this machine's zone is given below
        except ValueError:
            continue
        day = now.date() if form == "%H:%M" else found.date()
        # Not the offset of `now`: summer time may begin or end in between.
        return datetime.combine(day, found.time()).astimezone()
    raise InvalidRequest(
        f'{text!r} is no time: write one such as 14:00 or "{(now + timedelta(days=1)):%Y-%m-%d %H:%M}"'
    )
