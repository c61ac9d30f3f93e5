"""What the commands of `gpuhub` share: options, argument types, groups, and actions with a client of the broker."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

import click

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.cli.console import AdminConsole
from gpuhub.common.errors import InvalidRequest, SetupError
from gpuhub.common.paths import DEFAULT_INSTANCE, Paths
from gpuhub.common.units import parse_span, parse_span_or_zero
from gpuhub.ops.broker_connection import connect_to_broker

#: Entry points of other packages that add commands to `gpuhub`; each is a click command.
COMMAND_ENTRY_POINTS = "gpuhub.commands"
_HUB_CONFIG = "jupyterhub_config.py"
F = TypeVar("F", bound=Callable[..., Any])
#: What a command does with the broker's client, and the console for its output.
BrokerAction = Callable[[AsyncBrokerClient, AdminConsole], Awaitable[None]]


class OrderedGroup(click.Group):
    """A group that lists its commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class PluginGroup(OrderedGroup):
    """A group that other packages extend with commands through entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *sorted(_plugins())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        plugin = _plugins().get(cmd_name)
        if plugin is None:
            return None
        loaded: click.Command = plugin.load()
        return loaded


def _plugins() -> dict[str, EntryPoint]:
    return {plugin.name: plugin for plugin in entry_points(group=COMMAND_ENTRY_POINTS)}


class _SpanType(click.ParamType[int]):
    name = "span"

    def __init__(self, parse: Callable[[object], int]) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _NamesType(click.ParamType[tuple[str, ...]]):
    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(part.strip() for part in parts if part.strip())


#: A span of time in seconds, written as `30m`.
SPAN = _SpanType(parse_span)


#: A span of time in seconds, written as `30m`, or `0s`.
SPAN_OR_ZERO = _SpanType(parse_span_or_zero)


#: Names between commas.
NAMES = _NamesType()


def instance_option(command: F) -> F:
    """Add `--instance`, which becomes the argument `paths`."""
    return click.option(
        "--instance",
        "paths",
        default=DEFAULT_INSTANCE,
        show_default=True,
        callback=lambda _, __, value: Paths(value),
        help="Name of the gpuhub instance.",
    )(command)


def find_in_clone(name: str, program: Path = Path(sys.executable)) -> Path:
    """Return a file of the current folder if that is a clone, else of the clone whose `.venv` has the program."""
    is_clone = Path(_HUB_CONFIG).exists()
    return Path(name) if is_clone else program.parent.parent.parent / name


def cluster_file_option(command: F) -> F:
    """Add `--cluster-file`."""
    return click.option(
        "--cluster-file",
        type=click.Path(path_type=Path),
        default=lambda: find_in_clone("cluster.toml"),
        help="The settings; default: cluster.toml in gpuhub's folder.",
    )(command)


def hub_config_option(command: F) -> F:
    """Add `--hub-config`."""
    return click.option(
        "--hub-config",
        type=click.Path(path_type=Path),
        default=lambda: find_in_clone(_HUB_CONFIG),
        help="JupyterHub's configuration; default: jupyterhub_config.py in gpuhub's folder.",
    )(command)


def yes_option(command: F) -> F:
    """Add `--yes`."""
    return click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")(command)


def require_root(command: str) -> None:
    """Check that the process runs as root; `command` is named in the error."""
    if os.geteuid() != 0:
        raise SetupError(f"`gpuhub {command}` needs root, for Docker and for gpuhub's own secrets: run it with sudo")


def parse_time(text: str, now: datetime) -> datetime:
    """Return a time on this machine's clock from `14:00` (on the day of `now`) or `2026-12-01 08:00`.

    Raises:
        InvalidRequest: The text has another form.
    """
    for form in ("%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d"):
        try:
            parsed = datetime.strptime(text, form)  # noqa: DTZ007 - this machine's zone is given below
        except ValueError:
            continue
        day = now.date() if form == "%H:%M" else parsed.date()
        # The offset of `now` may be wrong: summer time can begin or end in between.
        return datetime.combine(day, parsed.time()).astimezone()
    raise InvalidRequest(
        f'{text!r} is not a time: write one such as 14:00 or "{(now + timedelta(days=1)):%Y-%m-%d %H:%M}"'
    )


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
