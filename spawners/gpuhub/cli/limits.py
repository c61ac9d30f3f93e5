"""`gpuhub limit`: list, set and clear."""

from __future__ import annotations

import click

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.schemas.limits import MAX_LEASE_S, UserLimitsRequest
from gpuhub.cli import tables
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.options import SPAN, BrokerRunner, OrderedGroup, instance_option, pass_broker
from gpuhub.common.errors import InvalidRequest
from gpuhub.common.paths import Paths


@click.group("limit", cls=OrderedGroup)
def limit_group() -> None:
    """Limits of single users: list, set, clear."""


@limit_group.command("list")
@instance_option
@pass_broker
def list_limits(broker: BrokerRunner, paths: Paths) -> None:
    """Show the limits that were set for single users in place of those of cluster.toml."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        console.write(tables.format_limits(await client.limits(), console.now, console.width))

    broker.run("limit list", paths, run)


@limit_group.command("set")
@instance_option
@click.argument("name")
@click.option("--gpus", type=click.IntRange(1, 100_000), metavar="N", help="GPUs at once.")
@click.option("--gpu-hours", type=click.FloatRange(0, 1e9, min_open=True), metavar="H", help="GPU-hours in 7 days.")
@click.option("--waiting", type=click.IntRange(1, 1000), metavar="N", help="Waiting requests.")
@click.option("--jobs", type=click.IntRange(1, 1_000_000), metavar="N", help="Jobs that have not ended.")
@click.option("--longest-lease", type=SPAN, metavar="SPAN", help="Longest time of a notebook or job, such as 12h.")
@click.option("--reason", default="", metavar="TEXT", help="Shown to the user.")
@pass_broker
def set_limits(
    broker: BrokerRunner,
    *,
    paths: Paths,
    name: str,
    gpus: int | None,
    gpu_hours: float | None,
    waiting: int | None,
    jobs: int | None,
    longest_lease: int | None,
    reason: str,
) -> None:
    """Set limits of the user NAME at once, without a change of cluster.toml; those not named are cluster.toml's.

    They replace the user's limits in [users] and [[groups]], and those that were set before. What the user has already
    stays. Limits for all members of a group together apply as before.
    """
    if (gpus, gpu_hours, waiting, jobs, longest_lease) == (None,) * 5:
        raise click.UsageError(f"no limit is given; `gpuhub limit clear {name}` gives cluster.toml's back")
    if longest_lease is not None and not 60 <= longest_lease <= MAX_LEASE_S:
        raise click.UsageError(f"--longest-lease is {longest_lease} s; between a minute and 366 days is possible")

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        try:
            request = UserLimitsRequest(
                max_gpus=gpus,
                gpu_hours_per_week=gpu_hours,
                max_waiting=waiting,
                max_jobs=jobs,
                longest_lease_s=longest_lease,
                reason=reason,
            )
        except ValueError as error:
            raise InvalidRequest(f"these limits cannot be set: {error}") from None
        await client.set_limits(name, request)
        console.write(f"Limits of {name} are set. `gpuhub limit clear {name}` gives those of cluster.toml back.")

    broker.run("limit set", paths, run)


@limit_group.command("clear")
@instance_option
@click.argument("name")
@pass_broker
def clear_limits(broker: BrokerRunner, paths: Paths, name: str) -> None:
    """Give the user NAME the limits of cluster.toml back."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        await client.clear_limits(name)
        console.write(f"{name} has the limits of cluster.toml again.")

    broker.run("limit clear", paths, run)
