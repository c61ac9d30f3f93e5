"""`gpuhub backup` and `gpuhub restore`: the whole state of the head node as one file."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

import click

from gpuhub.cli.console import AdminConsole
from gpuhub.cli.deployment import load_settings
from gpuhub.cli.options import cluster_file_option, hub_config_option, instance_option, require_root, yes_option
from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.common.secrets import read_private_file
from gpuhub.common.units import format_size

#: Maximum length of a passphrase, bytes.
_MAX_PASSPHRASE = 1024
_passphrase_option = click.option(
    "--passphrase-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A file with the passphrase, readable by root only.",
)
_file_argument = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))


@click.command("backup")
@instance_option
@cluster_file_option
@hub_config_option
@_file_argument
@click.option("--encrypt", is_flag=True, help="Ask for a passphrase, and encrypt the file.")
@_passphrase_option
def backup(
    paths: Paths, cluster_file: Path, hub_config: Path, file: Path, *, encrypt: bool, passphrase_file: Path | None
) -> None:
    """Write the whole state of the head node to FILE while everything runs.

    It has the databases, all secrets, accounts and settings, and none of the users' files.
    """
    from gpuhub.ops.backup import archive
    from gpuhub.ops.backup.contents import Head
    from gpuhub.ops.backup.encryption import check_passphrase
    from gpuhub.ops.backup.snapshot import write_backup

    require_root("backup")
    console = AdminConsole()
    archive.check_new_file(file)
    cluster = load_settings(cluster_file, paths)
    passphrase = None
    if encrypt or passphrase_file is not None:
        passphrase = check_passphrase(_ask_passphrase(passphrase_file, is_new=True))
    head = Head(paths=paths, cluster_file=cluster_file.absolute(), hub_config=hub_config.absolute())
    result = write_backup(file.absolute(), head, cluster, passphrase)
    for note in result.notes:
        console.write(f"Not in the backup: {note}.")
    kept = "encrypted" if passphrase else "NOT encrypted: a person who can read it can log in as any user"
    console.write(f"{file}: {result.count} files, {format_size(result.size)}, {kept}. Users' homes are not in it.")


@click.command("restore")
@instance_option
@cluster_file_option
@hub_config_option
@_file_argument
@_passphrase_option
@click.option("--replace", is_flag=True, help="Replace what this machine has; it is kept aside.")
@yes_option
def restore(
    paths: Paths,
    cluster_file: Path,
    hub_config: Path,
    file: Path,
    *,
    passphrase_file: Path | None,
    replace: bool,
    yes: bool,
) -> None:
    """Put the state of the backup FILE onto this machine, where nothing of gpuhub runs.

    Start it with `make up` afterwards. The machine from which the backup is must not run gpuhub again.
    """
    from gpuhub.ops.backup import archive, restoration
    from gpuhub.ops.backup.contents import Head
    from gpuhub.ops.deploy.programs import Supervisor

    require_root("restore")
    console = AdminConsole()
    if Supervisor(paths).is_running():
        raise SetupError(
            "gpuhub runs on this machine: stop it first, with `systemctl stop gpuhub` so that notebooks continue, or "
            "with `sudo make down`, which ends them"
        )
    passphrase = _ask_passphrase(passphrase_file, is_new=False) if archive.is_encrypted(file) else None
    head = Head(paths=paths, cluster_file=cluster_file.absolute(), hub_config=hub_config.absolute())
    with restoration.open_backup(file, head, passphrase) as plan:
        manifest = plan.manifest
        made = datetime.fromtimestamp(manifest.created_at).astimezone()
        console.write(
            f"Backup of {manifest.host}, {made:%Y-%m-%d %H:%M}, gpuhub {manifest.version}: {len(manifest.files)} files"
        )
        if plan.conflicts:
            console.write("\n".join(["This machine has a state of gpuhub, which is replaced:", *plan.conflicts]))
            if not replace:
                raise SetupError("nothing was restored: add --replace to replace these; they are kept aside")
        console.write(
            "The next `make up` ends notebooks and jobs that are not in the backup, as they started after it."
        )
        if not yes:
            console.confirm(f"Restore it to {paths.state}?")
        aside = restoration.apply(plan)
    if aside is not None:
        console.write(f"What was there before is in {aside}.")
    console.write("Restored. Now: sudo make up. The old head node must not run gpuhub again.")


def _ask_passphrase(file: Path | None, *, is_new: bool) -> str:
    """Return the passphrase from its file, or from the person at the terminal."""
    if file is not None:
        content = read_private_file(file, "--passphrase-file", content="the passphrase", limit=_MAX_PASSPHRASE)
        try:
            text = content[:_MAX_PASSPHRASE].decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise SettingsError(f"--passphrase-file: {str(file)!r} is not text in UTF-8") from None
        if not text:
            raise SettingsError(f"--passphrase-file: {str(file)!r} is empty")
        return text
    if not sys.stdin.isatty():
        raise SettingsError("the passphrase cannot be asked for without a terminal: use --passphrase-file")
    return str(click.prompt("Passphrase", hide_input=True, confirmation_prompt=is_new))
