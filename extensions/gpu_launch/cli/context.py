"""The context that all commands share: the hub, clients for it, and the console.

Results go to stdout, everything else to stderr; with --json the result is one JSON document.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import click

from gpu_launch.broker.client import BrokerClient
from gpu_launch.cli.connection import credentials
from gpu_launch.cli.connection.http import RETRY_LIMIT_S, Connection, Transfer, build_broker
from gpu_launch.cli.connection.hub_api import fetch_user_name
from gpu_launch.errors import GpuLaunchError

#: Seconds between updates of the progress line.
_REDRAW_S = 0.1


@dataclass
class Console:
    """The output of one command."""

    is_json: bool = False
    _is_drawn: bool = False
    _drawn_at: float = 0.0

    def print_result(self, value: Any, text: str) -> None:
        """Print the command's result: `value` with --json, else `text`."""
        self.clear_progress()
        click.echo(json.dumps(value, indent=2, ensure_ascii=False) if self.is_json else text)

    def print_note(self, text: str) -> None:
        """Print a message for a person on a line of its own."""
        self.clear_progress()
        click.echo(text, err=True)

    def draw_progress(self, text: str) -> None:
        """Show a line that the next one replaces; only on a terminal."""
        if sys.stderr.isatty() and time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._drawn_at = time.monotonic()
            # A line as wide as the terminal would wrap, and could not be cleared.
            columns = terminal_columns() - 1
            click.echo(f"\r\x1b[K{text[:columns]}", nl=False, err=True)
            self._is_drawn = True

    def clear_progress(self) -> None:
        """Clear the line of `draw_progress`."""
        if self._is_drawn:
            click.echo("\r\x1b[K", nl=False, err=True)
            self._is_drawn = False

    def write_output(self, text: str) -> None:
        """Write a job's own output; to stderr with --json, whose document goes to stdout."""
        self.clear_progress()
        stream = sys.stderr if self.is_json else sys.stdout
        stream.write(text)
        stream.flush()


def terminal_columns() -> int:
    """Return the width of the terminal; 120 without one, so that piped tables are not cut."""
    import shutil

    return shutil.get_terminal_size((120, 24)).columns


class CommandExit(GpuLaunchError):
    """Ends the command with a status, and with an error message if there is one."""

    def __init__(self, text: str = "", *, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


def exit_with(status: int) -> NoReturn:
    """End the command with this status and without a message."""
    raise CommandExit(status=status)


@dataclass
class Context:
    """The state of one process; each part is created when it is first used."""

    #: The value of `--hub`.
    hub_url: str | None = None
    console: Console = field(default_factory=Console)
    _noted: set[str] = field(default_factory=set)

    @cached_property
    def hub(self) -> credentials.Hub:
        return credentials.choose_hub(self.hub_url)

    @cached_property
    def broker(self) -> BrokerClient:
        return self.build_broker(RETRY_LIMIT_S)

    def build_broker(self, retry_limit_s: float) -> BrokerClient:
        """Build a broker client that waits up to `retry_limit_s` seconds for a restart."""
        return build_broker(self.hub, on_retry=self.note_once, retry_limit_s=retry_limit_s)

    @cached_property
    def transfer(self) -> Transfer:
        """Return the client for the user's files, logs and job states."""
        return Transfer(Connection(self.hub), on_retry=self.note_once)

    @cached_property
    def user(self) -> str:
        """Return the user of the token, empty if the hub does not return it."""
        return fetch_user_name(self.hub)

    def note_once(self, text: str) -> None:
        """Print a message unless it was printed since the last `reset_notes`."""
        if text not in self._noted:
            self._noted.add(text)
            self.console.print_note(f"gpu-launch: {text}")

    def reset_notes(self) -> None:
        """Allow all messages to be printed again, after the problem is over."""
        self._noted.clear()


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json`, which prints the result as one JSON document."""

    def set_json(context: click.Context, _: click.Parameter, value: bool) -> None:
        # It may also stand before the command.
        context.find_object(Context).console.is_json |= value  # type: ignore[union-attr]

    return click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=set_json,
        help="One JSON document on stdout; errors as JSON on stderr.",
    )(command)


pass_context = click.make_pass_decorator(Context)
