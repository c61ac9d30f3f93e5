"""What every command starts from: the hub, clients for it, and how to speak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import click

from gpu_launch.broker import Broker
from gpu_launch.cli import hubs, signin
from gpu_launch.cli.connection import PATIENCE_S, Connection, build_broker
from gpu_launch.cli.said import Said
from gpu_launch.cli.transfer import Transfer


@dataclass
class Context:
    """Made once a process; nothing is read or opened before it is used."""

    #: Given with `--hub`.
    hub_url: str | None = None
    said: Said = field(default_factory=Said)
    _told: set[str] = field(default_factory=set)

    @cached_property
    def hub(self) -> hubs.Hub:
        """The hub to use."""
        return hubs.choose(self.hub_url)

    @cached_property
    def broker(self) -> Broker:
        """Its broker."""
        return self.patient_broker(PATIENCE_S)

    def patient_broker(self, patience_s: float) -> Broker:
        """Its broker, whose restarts are waited out for so long."""
        return build_broker(self.hub, on_retry=self.tell_once, patience_s=patience_s)

    @cached_property
    def transfer(self) -> Transfer:
        """Files, logs and states of one's own jobs."""
        return Transfer(Connection(self.hub), on_retry=self.tell_once)

    @cached_property
    def user(self) -> str:
        """Whose token it is; empty where the hub does not say."""
        return signin.own_name(self.hub)

    def tell_once(self, text: str) -> None:
        """Say it, unless it was the last thing said of this kind."""
        if text not in self._told:
            self._told.add(text)
            self.said.note(f"gpu-launch: {text}")

    def answers_again(self) -> None:
        """What was wrong is over, so that the next time is said again."""
        self._told.clear()


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`, which turns the result into one JSON document."""

    def chosen(context: click.Context, _: click.Parameter, value: bool) -> None:
        context.find_object(Context).said.is_json = value  # type: ignore[union-attr]

    return click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=chosen,
        help="One JSON document on stdout; errors as JSON on stderr.",
    )(command)


pass_cli = click.make_pass_decorator(Context)
