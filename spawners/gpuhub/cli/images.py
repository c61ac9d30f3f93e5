"""`gpuhub image`: list, build, push, pin and gc."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import click

from gpuhub.backends.plugin import find_capabilities
from gpuhub.cli import tables
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.deployment import load_settings
from gpuhub.cli.options import (
    OrderedGroup,
    cluster_file_option,
    hub_config_option,
    instance_option,
    require_root,
    yes_option,
)
from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import DockerClients

T = TypeVar("T")


@click.group("image", cls=OrderedGroup)
def image_group() -> None:
    """Images: list, build, push, pin, gc."""


def _run(
    name: str, paths: Paths, cluster_file: Path, action: Callable[[DockerClients, ClusterSettings], Awaitable[T]]
) -> T:
    """Run an action with clients of all nodes."""
    require_root(name)
    cluster = load_settings(cluster_file, paths)
    if not find_capabilities(cluster).containers:
        raise SetupError(f"`gpuhub {name}`: the nodes run {cluster.slurm.runtime} instead of Docker's images")

    async def run() -> T:
        daemons = DockerClients(cluster.nodes, instance=paths.instance, run_dir=paths.run)
        try:
            return await action(daemons, cluster)
        finally:
            daemons.close()

    return asyncio.run(run())


@image_group.command("list")
@instance_option
@cluster_file_option
def list_images(paths: Paths, cluster_file: Path) -> None:
    """Show the images on the nodes: size, age, and what uses them."""
    from gpuhub.ops.images import inventory

    console = AdminConsole()
    images, problems = _run("image list", paths, cluster_file, inventory.read_images)
    console.write(tables.format_images(images, console.now, console.width))
    for node, problem in problems.items():
        console.write(f"{node}: {problem}")


@image_group.command("build")
@instance_option
@cluster_file_option
@hub_config_option
@click.option("--refresh", is_flag=True, help="Build all images again, with Debian's current packages.")
def build(*, paths: Paths, cluster_file: Path, hub_config: Path, refresh: bool) -> None:
    """Build missing images, without sending them to the nodes."""
    from gpuhub.ops.images import distribution
    from gpuhub.ops.images.progress import ProgressTerminal

    console, source = AdminConsole(), hub_config.resolve().parent

    async def action(daemons: DockerClients, cluster: ClusterSettings) -> str:
        images = await distribution.build(daemons, cluster, paths, source, refresh=refresh, progress=ProgressTerminal())
        return ", ".join(image.name for image in images)

    console.write(f"Built: {_run('image build', paths, cluster_file, action)}. `gpuhub image push` sends them.")


@image_group.command("push")
@instance_option
@cluster_file_option
@click.argument("names", nargs=-1, metavar="[NAME]...")
def push(paths: Paths, cluster_file: Path, names: tuple[str, ...]) -> None:
    """Send images from the node that builds to all others; default: all that profiles offer.

    Nodes get only the layers that they lack.
    """
    from gpuhub.ops.images import distribution
    from gpuhub.ops.images.progress import ProgressTerminal

    console = AdminConsole()

    async def action(daemons: DockerClients, cluster: ClusterSettings) -> None:
        await distribution.push(daemons, cluster, names, ProgressTerminal())

    _run("image push", paths, cluster_file, action)
    console.write("All nodes have them.")


@image_group.command("pin")
@instance_option
@cluster_file_option
@click.argument("name", metavar="NAME")
def pin(paths: Paths, cluster_file: Path, name: str) -> None:
    """Give the image NAME a tag that stays, on all nodes.

    A profile with this tag keeps its image when NAME is built again.
    """
    from gpuhub.ops.images import distribution
    from gpuhub.ops.images.progress import ProgressTerminal

    console = AdminConsole()

    async def action(daemons: DockerClients, cluster: ClusterSettings) -> str:
        return await distribution.pin(daemons, cluster, name, ProgressTerminal())

    pinned = _run("image pin", paths, cluster_file, action)
    console.write(f'All nodes have it. In a profile of cluster.toml: image = "{pinned}"')


@image_group.command("gc")
@instance_option
@cluster_file_option
@yes_option
def collect_garbage(*, paths: Paths, cluster_file: Path, yes: bool) -> None:
    """Remove gpuhub's images that nothing needs from the nodes.

    Those are older versions, and families that no profile offers. Images that a container uses or that a profile names
    stay, and images that gpuhub did not build.
    """
    from gpuhub.ops.images import inventory

    console = AdminConsole()

    async def action(daemons: DockerClients, cluster: ClusterSettings) -> dict[str, int]:
        images, problems = await inventory.read_images(daemons, cluster)
        for node, problem in problems.items():
            console.write(f"{node}: {problem}")
        unused = inventory.find_unused(images, cluster)
        if not unused:
            return {}
        console.write(tables.format_images(unused, console.now, console.width))
        if not yes:
            console.confirm("Remove them?")
        return await inventory.remove_images(daemons, unused)

    freed = _run("image gc", paths, cluster_file, action)
    lines = [f"{node}: {size / 1e9:.1f} GB are free again" for node, size in freed.items()]
    console.write("\n".join(lines) or "Nothing to remove.")
