"""`gpuhub slurm`: init, power and users."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from gpuhub.cli.console import AdminConsole
from gpuhub.cli.deployment import load_settings
from gpuhub.cli.options import OrderedGroup, cluster_file_option, instance_option, require_root, yes_option
from gpuhub.common.errors import InvalidRequest
from gpuhub.common.paths import Paths


@click.group("slurm", cls=OrderedGroup)
def slurm_group() -> None:
    """Slurm for machines that have none: init, power, users."""


@slurm_group.command("init")
@instance_option
@cluster_file_option
@click.option(
    "--head-computes/--no-head-computes",
    default=None,
    help="Run jobs on the head node; default: if it is a node of cluster.toml.",
)
@click.option("--accounting", is_flag=True, help="Install slurmdbd and MariaDB on the head node.")
@click.option("--rest", is_flag=True, help="Install slurmrestd on the head node, for loopback only.")
@click.option("--partition", metavar="NAME", help="Default: that of [slurm] in cluster.toml, else gpu.")
@yes_option
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write the files there, keys among them, and change no machine.",
)
def init(
    *,
    paths: Paths,
    cluster_file: Path,
    head_computes: bool | None,
    accounting: bool,
    rest: bool,
    partition: str | None,
    yes: bool,
    output: Path | None,
) -> None:
    """Install Slurm on this machine and on the nodes of cluster.toml.

    Shows the differences to what is there, asks once, installs the distribution's packages over SSH, writes the files,
    starts the services, and checks that each node takes work. Again, it shows that there is nothing to do, or changes
    what differs. A Slurm that gpuhub did not install is never changed.
    """
    from gpuhub.ops.slurm.installation import SlurmRequest, initialize_slurm
    from gpuhub.ops.slurm.machines import LocalShell

    require_root("slurm init")
    if partition is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.@+-]{0,63}", partition):
        raise InvalidRequest(f"--partition {partition!r}: letters, digits and _ . @ + - are needed, such as gpu")
    request = SlurmRequest(
        head_computes=head_computes,
        has_accounting=accounting,
        has_rest=rest,
        partition=partition,
        yes=yes,
        output=output,
        power_command=build_power_command(paths, cluster_file),
    )
    initialize_slurm(request, load_settings(cluster_file, paths), paths, AdminConsole(), LocalShell())


def build_power_command(paths: Paths, cluster_file: Path) -> tuple[str, ...]:
    """Return the command by which Slurm's programs switch nodes."""
    gpuhub = str(Path(sys.executable).with_name("gpuhub"))
    return (gpuhub, "slurm", "power", "--instance", paths.instance, "--cluster-file", str(cluster_file.resolve()))


@slurm_group.command("power")
@instance_option
@cluster_file_option
@click.argument("action", type=click.Choice(["suspend", "resume"]))
@click.argument("hosts", metavar="NODES")
def power(*, paths: Paths, cluster_file: Path, action: str, hosts: str) -> None:
    """Put the nodes NODES to sleep, or wake them: slurmctld calls it.

    NODES is a list as Slurm writes it, such as rig[2-3]. An administrator uses `scontrol update NodeName=NODES
    State=POWER_UP`, so that Slurm knows.
    """
    from gpuhub.ops.slurm.power import switch_nodes

    require_root("slurm power")
    switch_nodes(load_settings(cluster_file, paths), paths, action, hosts)


@slurm_group.command("users")
@instance_option
@cluster_file_option
@yes_option
def users(*, paths: Paths, cluster_file: Path, yes: bool) -> None:
    """Give gpuhub's users the same account on this machine and on every node.

    Shows which accounts would be created, asks, and creates them, locked and without a home. Refused where a name has
    another number on a machine, or a number another name.
    """
    from gpuhub.ops.slurm.machines import LocalShell
    from gpuhub.ops.slurm.users import create_accounts

    require_root("slurm users")
    create_accounts(load_settings(cluster_file, paths), paths, AdminConsole(), LocalShell(), yes=yes)
