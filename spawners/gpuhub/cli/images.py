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
from gpuhub.common.errors import InvalidRequest, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import DockerClients

T = TypeVar("T")


@click.group("image", cls=OrderedGroup)
def image_group() -> None:
    """Images: list, build, push, pin, gc.

    Where nodes run Apptainer, list, build and push are about the image file of [slurm], and the others are refused.
    """


def _load_apptainer(name: str, paths: Paths, cluster_file: Path) -> ClusterSettings | None:
    """Return the settings if the nodes run an image file with Apptainer, else None."""
    require_root(name)
    cluster = load_settings(cluster_file, paths)
    is_apptainer = not find_capabilities(cluster).containers and cluster.slurm.runtime == "apptainer"
    return cluster if is_apptainer else None


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
    """Show the images on the nodes: size, age, and what uses them.

    With Apptainer: the image file on each node, and whether it runs there.
    """
    from gpuhub.ops.images import inventory
    from gpuhub.ops.slurm.image_file import list_image_files
    from gpuhub.ops.slurm.machines import LocalShell

    console = AdminConsole()
    if (cluster := _load_apptainer("image list", paths, cluster_file)) is not None:
        list_image_files(cluster, paths, console, LocalShell())
        return
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
    """Build missing images, without sending them to the nodes.

    With Apptainer: build the notebook image with this machine's Docker, and make the image file of [slurm] of it.
    """
    from gpuhub.ops.images import distribution
    from gpuhub.ops.images.progress import ProgressTerminal
    from gpuhub.ops.slurm.image_file import build_image_file

    console, source = AdminConsole(), hub_config.resolve().parent
    if (apptainer := _load_apptainer("image build", paths, cluster_file)) is not None:
        console.write(asyncio.run(build_image_file(apptainer, paths, source, ProgressTerminal(), refresh=refresh)))
        return

    async def action(daemons: DockerClients, cluster: ClusterSettings) -> str:
        images = await distribution.build(daemons, cluster, paths, source, refresh=refresh, progress=ProgressTerminal())
        return ", ".join(image.name for image in images)

    console.write(f"Built: {_run('image build', paths, cluster_file, action)}. `gpuhub image push` sends them.")


@image_group.command("push")
@instance_option
@cluster_file_option
@yes_option
@click.argument("names", nargs=-1, metavar="[NAME]...")
def push(*, paths: Paths, cluster_file: Path, yes: bool, names: tuple[str, ...]) -> None:
    """Send images from the node that builds to all others; default: all that profiles offer.

    Nodes get only the layers that they lack. With Apptainer: copy this machine's image file over SSH to the nodes that
    have another one, and try it there; NAME and profiles have no meaning then.
    """
    from gpuhub.ops.images import distribution
    from gpuhub.ops.images.progress import ProgressTerminal
    from gpuhub.ops.slurm.image_file import push_image_file
    from gpuhub.ops.slurm.machines import LocalShell

    console = AdminConsole()
    if (apptainer := _load_apptainer("image push", paths, cluster_file)) is not None:
        if names:
            raise InvalidRequest("`gpuhub image push` takes no name with Apptainer: all nodes run slurm.image")
        push_image_file(apptainer, paths, console, LocalShell(), yes=yes)
        return

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
    stay, and so do pinned images, and images that gpuhub did not build.
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
