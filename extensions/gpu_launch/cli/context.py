"""The context that all commands share: the hub, clients for it, and the console."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import click

from gpu_launch.broker.client import BrokerClient
from gpu_launch.cli import authentication, credentials
from gpu_launch.cli.console import Console
from gpu_launch.cli.http import RETRY_LIMIT_S, Connection, Transfer, build_broker


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

    def build_broker(self, patience_s: float) -> BrokerClient:
        """Build a broker client that waits up to `patience_s` seconds for a restart."""
        return build_broker(self.hub, on_retry=self.note_once, patience_s=patience_s)

    @cached_property
    def transfer(self) -> Transfer:
        """Return the client for the user's files, logs and job states."""
        return Transfer(Connection(self.hub), on_retry=self.note_once)

    @cached_property
    def user(self) -> str:
        """Return the user of the token, empty if the hub does not return it."""
        return authentication.fetch_user_name(self.hub)

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
        context.find_object(Context).console.is_json = value  # type: ignore[union-attr]

    return click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=set_json,
        help="One JSON document on stdout; errors as JSON on stderr.",
    )(command)


pass_context = click.make_pass_decorator(Context)
