"""`gpuhub user`: end and free."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.deployment import load_settings
from gpuhub.cli.options import (
    BrokerRunner,
    OrderedGroup,
    cluster_file_option,
    instance_option,
    pass_broker,
    require_root,
    yes_option,
)
from gpuhub.common.errors import NotFound
from gpuhub.common.paths import Paths
from gpuhub.ops.broker_connection import connect_to_hub


@click.group("user", cls=OrderedGroup)
def user_group() -> None:
    """Users: end, free."""


@user_group.command("end")
@instance_option
@click.argument("name")
@yes_option
@pass_broker
def end(broker: BrokerRunner, paths: Paths, name: str, yes: bool) -> None:
    """End all that a user has: notebooks, jobs, waiting requests, terminals, limits of their own, tokens and sessions.

    The home stays. Who may log in is decided by cluster.toml: remove the user there first.
    """

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        leases = await client.leases(owner=name)
        if not yes:
            console.confirm(f"End {name}'s {len(leases)} leases, and all tokens and sessions?")
        hub = connect_to_hub(paths)
        try:
            tokens = await hub.revoke_access(name)
        except NotFound:
            if not leases:
                raise
            tokens = 0  # a user who was deleted at the hub may still have leases
        finally:
            await hub.close()
        shares = await client.end_shares_of_user(name)
        with suppress(NotFound):
            await client.clear_limits(name)
        ended = await client.release_all(name)
        also = f", and {len(shares)} shares of outputs" if shares else ""
        console.write(f"{name}: {ended} leases and {tokens} tokens ended{also}. Containers are removed now.")

    broker.run("user end", paths, run)


@user_group.command("free")
@instance_option
@cluster_file_option
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--keep-files", is_flag=True, help="The same person has a new account: keep home, scratch and UID.")
@click.option("--home-moved", is_flag=True, help="The home was moved aside on the file server.")
@yes_option
def free(
    *, paths: Paths, cluster_file: Path, names: tuple[str, ...], keep_files: bool, home_moved: bool, yes: bool
) -> None:
    """Free the name NAME of a former user for another account."""
    from gpuhub.ops import former_users

    require_root("user free")
    console, cluster = AdminConsole(), load_settings(cluster_file, paths)
    if not (keep_files or yes):
        console.confirm(f"Move the homes of {', '.join(names)} aside, and remove their scratch on all nodes?")
    for name in names:
        if keep_files:
            lines = former_users.forget_account(paths, name)
        else:
            lines = former_users.free_name(cluster, paths, name, home_moved=home_moved)
        for line in lines or [f"{name}: there was nothing to free."]:
            console.write(line)
