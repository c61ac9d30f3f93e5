"""`gpuhub node`: list, autoinstall, prepare, add, invite, remove, firewall, cordon, drain, undrain and accept."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.schemas import CordonRequest, NodeView
from gpuhub.cli import tables
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.deployment import load_settings, start_instance
from gpuhub.cli.options import (
    SPAN_OR_ZERO,
    BrokerRunner,
    OrderedGroup,
    cluster_file_option,
    hub_config_option,
    instance_option,
    pass_broker,
    require_root,
    yes_option,
)
from gpuhub.common.errors import InvalidRequest, NotFound
from gpuhub.common.paths import Paths
from gpuhub.common.units import format_span


@click.group("node", cls=OrderedGroup)
def node_group() -> None:
    """Nodes: list, autoinstall, prepare, add, invite, remove, firewall, power, cordon, drain, undrain, accept."""


name_argument = click.argument("name", metavar="NAME")
reason_option = click.option("--reason", default="", help="Shown to users.")


@node_group.command("list")
@instance_option
@pass_broker
def list_nodes(broker: BrokerRunner, paths: Paths) -> None:
    """Show every node: state, free GPUs, leases."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        console.write(tables.format_nodes(await client.nodes(), console.width))

    broker.run("node list", paths, run)


@node_group.command("cordon")
@instance_option
@name_argument
@reason_option
@pass_broker
def cordon(broker: BrokerRunner, paths: Paths, name: str, reason: str) -> None:
    """Stop new work on the node NAME; what runs there continues."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        await find_node(client, name)
        # A cordon ends nothing, so the administrator is not asked.
        await _show_leases(client, console, name)
        _write_state(console, await client.change_node(name, "cordon", CordonRequest(reason=reason)))

    broker.run("node cordon", paths, run)


@node_group.command("drain")
@instance_option
@name_argument
@reason_option
@click.option("--grace", type=SPAN_OR_ZERO, default="30m", metavar="SPAN", help="Until leases there end; default: 30m.")
@yes_option
@pass_broker
def drain(broker: BrokerRunner, *, paths: Paths, name: str, reason: str, grace: int, yes: bool) -> None:
    """Stop new work on the node NAME, and end what runs there."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        await find_node(client, name)
        if await _show_leases(client, console, name) and not yes:
            when = f"in {format_span(grace)}" if grace else "at once"
            console.confirm(f"Drain {name}? All of this ends {when}.")
        request = CordonRequest(reason=reason, grace_s=grace)
        _write_state(console, await client.change_node(name, "drain", request))

    broker.run("node drain", paths, run)


@node_group.command("undrain")
@instance_option
@name_argument
@pass_broker
def undrain(broker: BrokerRunner, paths: Paths, name: str) -> None:
    """Let the node NAME take work again, after a cordon or a drain."""

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        _write_state(console, await client.change_node(name, "undrain"))

    broker.run("node undrain", paths, run)


@node_group.command("accept")
@instance_option
@name_argument
@click.argument("index", type=click.IntRange(0, 255), metavar="GPU")
@yes_option
@pass_broker
def accept(broker: BrokerRunner, *, paths: Paths, name: str, index: int, yes: bool) -> None:
    """Grant the GPU with the number GPU of the node NAME again.

    For a GPU that is blocked by an Xid error or by a PCIe link that became slower, after you have reset or checked it.
    A reboot of the node does the same without this command.
    """

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        node = await find_node(client, name)
        gpu = next((gpu for gpu in node.gpus if gpu.index == index), None)
        if gpu is not None:
            console.write(f"GPU {index} ({gpu.model}) of {name} is {gpu.state.value}: {gpu.message or 'no problem'}")
        if not yes:
            console.confirm("Others may get it from now on. Was it reset or checked?")
        _write_state(console, await client.accept_gpu(name, index))

    broker.run("node accept", paths, run)


async def find_node(client: AsyncBrokerClient, name: str) -> NodeView:
    """Return a node as the broker shows it.

    Raises:
        NotFound: No node has this name.
    """
    nodes = {node.name: node for node in await client.nodes()}
    if name not in nodes:
        raise NotFound(f"there is no node {name!r}; there are: {', '.join(nodes)}")
    return nodes[name]


async def _show_leases(client: AsyncBrokerClient, console: AdminConsole, node: str) -> bool:
    """Write the leases on the node, and return whether there are any."""
    leases = await client.leases(node=node)
    if not leases:
        console.write(f"Nothing runs on {node}.")
        return False
    console.write_leases(node, leases)
    console.write()
    return True


def _write_state(console: AdminConsole, node: NodeView) -> None:
    state, message = node.state.value, node.message or ""
    if not message.startswith(state):
        message = f"{state}: {message}" if message else state
    console.write(f"{node.name} is {message}")


@node_group.command("autoinstall")
@click.option("--system", type=click.Choice(["ubuntu", "debian"]), required=True, help="What will be installed.")
@click.option("--name", required=True, help="The machine's name, such as rig4.")
@click.option("--user", required=True, help="The account that you log in with.")
@click.option(
    "--ssh-key",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="Your public key, such as ~/.ssh/id_ed25519.pub.",
)
@click.option("--password-hash", type=click.Path(path_type=Path), metavar="FILE", help="Default: no password opens it.")
@click.option("--disk", metavar="DEVICE", help="The disk that is erased, such as /dev/nvme0n1.")
@click.option("--any-disk", is_flag=True, help="Ubuntu: erase the largest disk. Debian: erase the only one, or ask.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Default: standard output.")
def autoinstall(
    *,
    system: Literal["ubuntu", "debian"],
    name: str,
    user: str,
    ssh_key: Path,
    password_hash: Path | None,
    disk: str | None,
    any_disk: bool,
    output: Path | None,
) -> None:
    """Write the file of an unattended installation, which ERASES a machine.

    Ubuntu's autoinstall (user-data) or Debian's preseed. The account has your key, and sudo without a password, so that
    `gpuhub node prepare` can continue.
    """
    from gpuhub.ops.provision.installer_files import (
        LOCKED,
        InstallerRequest,
        build_installer_file,
        read_first_line,
        write_installer_file,
    )

    if (disk is None) != any_disk:
        raise InvalidRequest(
            "the installation erases a disk: name it with --disk /dev/nvme0n1, or let the installer choose it with "
            "--any-disk"
        )
    request = InstallerRequest(
        system=system,
        name=name,
        user=user,
        public_key=read_first_line(ssh_key),
        disk=disk,
        password_hash=LOCKED if password_hash is None else read_first_line(password_hash),
    )
    text, console = build_installer_file(request), AdminConsole()
    if output is None:
        console.write(text.rstrip("\n"))
        return
    write_installer_file(output, text)
    console.write(
        f"{output} erases a disk of the machine that is started with it. Then: gpuhub node prepare, node add."
    )


@node_group.command("prepare")
@instance_option
@click.argument("urls", nargs=-1, metavar="[ssh://USER@MACHINE]...")
@click.option(
    "--from",
    "hosts_file",
    type=click.Path(path_type=Path),
    metavar="HOSTS_FILE",
    help="A file with one ssh://USER@MACHINE on each line.",
)
@click.option(
    "--driver", metavar="BRANCH", help="NVIDIA's driver, such as 570; default: as the nodes or these machines have."
)
@yes_option
def prepare(paths: Paths, urls: tuple[str, ...], hosts_file: Path | None, driver: str | None, *, yes: bool) -> None:
    """Install what machines lack to become nodes: driver, Docker, toolkit.

    For Debian 12 and 13, Ubuntu 22.04 and 24.04. Shows what each machine has and what would be installed, asks once,
    and works on all of them at the same time. Nothing is removed, no installed driver or Docker is replaced, no machine
    is rebooted. On a machine that has everything, nothing changes.
    """
    from gpuhub.ops.provision.node_preparation import PreparationRequest, collect_targets, prepare_nodes

    require_root("node prepare")
    request = PreparationRequest(targets=collect_targets(urls, hosts_file), driver=driver, yes=yes)
    prepare_nodes(request, paths, AdminConsole())


@node_group.command("add")
@instance_option
@cluster_file_option
@click.argument("url", metavar="ssh://USER@MACHINE")
@click.option("--name", help="The node's name; default: the machine's, or rigN.")
@click.option("--address", metavar="IP", help="Where other nodes reach it; default: where ssh does.")
@click.option("--tls", is_flag=True, help="Reach its Docker over mutual TLS instead of SSH.")
@click.option("--data-interface", metavar="NAME", help="Its network card for ranks, where the other nodes have one.")
@click.option("--dry-run", is_flag=True, help="Check the machine, show the changes, and change nothing.")
@click.option("--up", is_flag=True, help="Run `gpuhub up` afterwards: send images, let services use the node.")
@yes_option
@hub_config_option
def add(
    *,
    paths: Paths,
    cluster_file: Path,
    url: str,
    name: str | None,
    address: str | None,
    tls: bool,
    data_interface: str | None,
    dry_run: bool,
    up: bool,
    yes: bool,
    hub_config: Path,
) -> None:
    """Check a machine and add it to the cluster, or repair a node.

    The machine is named as you reach it with ssh.
    """
    from gpuhub.ops.provision import node_join
    from gpuhub.ops.provision.node_join import JoinRequest
    from gpuhub.ops.provision.ssh_session import parse_target

    require_root("node add")
    request = JoinRequest(
        target=parse_target(url),
        cluster_file=cluster_file,
        name=name,
        address=address,
        tls=tls,
        data_interface=data_interface,
        yes=yes,
        dry_run=dry_run,
    )
    node_join.add_node(
        request, paths, AdminConsole(), (lambda: start_instance(paths, cluster_file, hub_config)) if up else None
    )


@node_group.command("invite")
@instance_option
@cluster_file_option
@click.option("--name", required=True, help="The guest's name, such as that of its owner.")
@click.option("--up", is_flag=True, help="Run `gpuhub up` afterwards, so that hub and broker know the guest.")
@hub_config_option
def invite(*, paths: Paths, cluster_file: Path, name: str, up: bool, hub_config: Path) -> None:
    """Invite a friend's machine: print the one command that lends it over the internet.

    The command is valid once, and for a day. It needs [guests] in cluster.toml.
    """
    from gpuhub.ops.guests import invitation

    require_root("node invite")
    request = invitation.InviteRequest(name=name, cluster_file=cluster_file)
    invitation.invite(request, paths, AdminConsole())
    if up:
        start_instance(paths, cluster_file, hub_config)


@node_group.command("remove")
@instance_option
@cluster_file_option
@name_argument
@click.option("--force", is_flag=True, help="End what runs there; continue if it does not answer.")
@click.option("--ssh", metavar="ssh://USER@MACHINE", help="How you log in there; default: as it was added.")
@yes_option
@hub_config_option
def remove(
    *, paths: Paths, cluster_file: Path, name: str, force: bool, ssh: str | None, yes: bool, hub_config: Path
) -> None:
    """Take the node NAME out of the cluster."""
    from gpuhub.ops.provision import node_removal
    from gpuhub.ops.provision.ssh_session import parse_target

    require_root("node remove")
    if name in {node.name for node in load_settings(cluster_file, paths).nodes if node.guest}:
        from gpuhub.ops.guests import invitation

        console = AdminConsole()
        if not yes:
            console.confirm(f"Remove the guest {name}? Jobs there end, and their files are not copied back.")
        invitation.remove_guest(
            name, paths, cluster_file, console, lambda: start_instance(paths, cluster_file, hub_config)
        )
        return
    request = node_removal.RemovalRequest(
        name=name,
        cluster_file=cluster_file,
        force=force,
        yes=yes,
        target=None if ssh is None else parse_target(ssh),
    )
    node_removal.remove_node(request, paths, AdminConsole(), lambda: start_instance(paths, cluster_file, hub_config))


@node_group.command("firewall")
@instance_option
@cluster_file_option
@name_argument
def firewall(paths: Paths, cluster_file: Path, name: str) -> None:
    """Show the packet filter of the node NAME."""
    from gpuhub.ops.provision.node_join import describe_firewall

    require_root("node firewall")
    cluster = load_settings(cluster_file, paths)
    try:
        node = cluster.node(name)
    except KeyError:
        names = ", ".join(node.name for node in cluster.nodes)
        raise NotFound(f"there is no node {name!r}; there are {names}") from None
    AdminConsole().write(describe_firewall(cluster, node, paths))
