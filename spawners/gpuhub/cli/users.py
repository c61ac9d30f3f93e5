"""`gpuhub user`: free."""

from __future__ import annotations

from pathlib import Path

import click

from gpuhub.cli.console import AdminConsole
from gpuhub.cli.deployment import load_settings
from gpuhub.cli.options import OrderedGroup, cluster_file_option, instance_option, require_root, yes_option
from gpuhub.common.paths import Paths


@click.group("user", cls=OrderedGroup)
def user_group() -> None:
    """Users: free."""


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
