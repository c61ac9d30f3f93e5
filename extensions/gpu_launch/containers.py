"""The containers that a launch runs in, whoever asked for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from gpu_launch import wire
from gpu_launch.plan import Plan
from gpu_launch.roster import Roster
from gpu_launch.runs import RunFolder


class Containers(Protocol):
    """Asked for by a notebook (`gang.Gang`), or there already (`detached.given.GivenGang`). Safe in several threads."""

    @property
    def plan(self) -> Plan:
        """What was asked for."""

    @property
    def run(self) -> RunFolder:
        """The folder by which workers find their controller."""

    @property
    def job(self) -> wire.Job | None:
        """The broker's job as last seen; None while there is none, or where it cannot be seen."""

    @property
    def is_alone(self) -> bool:
        """Whether this process's own container is all there is."""

    def check(self) -> None:
        """Raise what went wrong: a worker that ended, a job that was ended for us."""

    def is_started(self) -> bool:
        """Whether every container runs."""

    def workers(self) -> tuple[wire.Worker, ...]:
        """The workers that are counted on."""

    def roster(self) -> Roster | None:
        """Who takes part in a start made now; None while that is not decided."""

    def go_without(self, indexes: Iterable[int]) -> None:
        """Count no longer on these workers."""

    def look(self) -> None:
        """Learn how the job is now, rather than wait for its news."""

    def begin(self, *, settings: dict[str, Any]) -> None:
        """Ask for the containers; `settings` is what engines are started with, see `engine_process`."""

    def publish(self, connection: dict[str, Any]) -> None:
        """Give engines the way to the controller."""

    def stop(self) -> None:
        """Free everything; returns when it is free. May be called again."""
