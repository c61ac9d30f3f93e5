"""Brings the images to every node of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpuhub.containers.daemons import Daemons
from gpuhub.errors import SetupError
from gpuhub.head.report import Report as Notes
from gpuhub.images.building import build_images, find_image
from gpuhub.images.distributing import ensure_sent, send_image
from gpuhub.images.plan import NOTEBOOK
from gpuhub.images.progress import Report, Terminal
from gpuhub.images.sources import read_sources
from gpuhub.paths import Paths
from gpuhub.settings import Cluster, Node


async def bring_images(
    daemons: Daemons, cluster: Cluster, paths: Paths, source: Path, notes: Notes, *, shown: Report | None = None
) -> None:
    """Build what is missing on the nearest node, and send it to every node that lacks it; quick when all is there.

    `source` is the root of gpuhub's source tree.

    Raises:
        GpuhubError: with what to install or mend.
    """
    report = shown or Terminal()
    sources = read_sources(source)
    builder = nearest(cluster)
    built = await daemons.run(
        builder, lambda client: build_images(client, paths.images, sources, cluster.images, report), long=True
    )
    await send(daemons, [image.name for image in built], builder, report)
    await send_own(daemons, own_images(cluster), builder, report)
    sizes = ", ".join(f"{image.name} {image.size / 1e9:.1f} GB" for image in built)
    notes.note(f"  ✓ Images on every node: {sizes}")


async def send(daemons: Daemons, names: Sequence[str], builder: str, report: Report) -> None:
    """Send images of the builder's node to all others, which take them at the same time.

    Fits any image that somebody built there, such as one based on gpuhub/notebook. `latest` then means it everywhere.
    """
    origin = await daemons.run(builder, lambda client: client, long=True)

    async def send_to(node: str) -> None:
        await daemons.run(node, lambda client: ensure_sent(names, origin, client, node, report), long=True)

    await asyncio.gather(*(send_to(node.name) for node in daemons.nodes if node.name != builder))


def own_images(cluster: Cluster) -> list[str]:
    """The images of profiles that gpuhub does not build: somebody else's, or based on gpuhub/notebook."""
    return sorted({profile.image for profile in cluster.profiles} - {f"{NOTEBOOK}:latest"})


async def send_own(daemons: Daemons, names: Sequence[str], builder: str, report: Report) -> None:
    """Send images that somebody made on the builder's node to all others.

    Raises:
        SetupError: the builder's node has no such image.
    """
    origin = await daemons.run(builder, lambda client: client, long=True)
    for name in names:
        if await daemons.run(builder, partial(find_image, name=name)) is None:
            raise SetupError(
                f"a profile wants the image {name}, and node {builder} has none of that name: "
                "build or load it there, then `sudo make up` sends it to the other nodes"
            )

    def send_all(node: str, client: Any) -> None:
        for name in names:
            send_image(name, origin, client, node, report)

    others = [node.name for node in daemons.nodes if node.name != builder]
    await asyncio.gather(*(daemons.run(node, partial(send_all, node), long=True) for node in others))


def nearest(cluster: Cluster) -> str:
    """The node to build on: one whose daemon is on the head node itself if there is one, else the first."""
    return min(cluster.nodes, key=_distance).name


def _distance(node: Node) -> bool:
    return not node.docker.startswith("unix://")
