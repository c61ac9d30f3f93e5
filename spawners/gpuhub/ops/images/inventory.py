"""Images on the nodes: what each node has, what containers use, and the removal of what nothing needs."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import docker.errors

from gpuhub.common.errors import GpuhubError
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import CallKind, DockerClients
from gpuhub.ops.images.build_plan import BASE, PARENTS
from gpuhub.ops.images.distribution import PINNED, choose_builder, list_families, with_tag

#: All images that gpuhub builds.
OWN_IMAGES = frozenset({BASE, *PARENTS})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeImage:
    """An image on a node."""

    node: str
    id: str
    #: Names with tags, in order; those of other images of the node are not here.
    names: tuple[str, ...]
    #: Size of the image, bytes, with the layers that it shares with other images.
    size: int
    made_at: datetime
    #: Number of the node's containers that use it, also stopped ones.
    containers: int


async def read_images(daemons: DockerClients, cluster: ClusterSettings) -> tuple[list[NodeImage], dict[str, str]]:
    """Return gpuhub's images and those of profiles on all nodes, and why nodes did not answer, by name."""
    offered = list_offered(cluster)
    nodes = [node.name for node in cluster.nodes]
    answers = await asyncio.gather(
        *(daemons.run(node, partial(_read_node, node=node, offered=offered)) for node in nodes),
        return_exceptions=True,
    )
    images: list[NodeImage] = []
    problems: dict[str, str] = {}
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, GpuhubError):
            problems[node] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            images += answer
    return images, problems


def list_offered(cluster: ClusterSettings) -> frozenset[str]:
    """Return the images that profiles offer, with their tags."""
    return frozenset(with_tag(image) for profile in cluster.profiles for image in profile.offered_images)


def _read_node(client: Any, node: str, offered: Collection[str]) -> list[NodeImage]:
    used = [container["ImageID"] for container in client.containers(all=True)]
    images = []
    for image in client.images():
        names = [name for name in image["RepoTags"] or () if name in offered or _repository(name) in OWN_IMAGES]
        if names:
            images.append(
                NodeImage(
                    node=node,
                    id=image["Id"],
                    names=tuple(sorted(names)),
                    size=image["Size"],
                    made_at=datetime.fromtimestamp(image["Created"], UTC),
                    containers=used.count(image["Id"]),
                )
            )
    return images


def _repository(name: str) -> str:
    return name.rpartition(":")[0]


def find_unused(images: Sequence[NodeImage], cluster: ClusterSettings) -> list[NodeImage]:
    """Return the images of gpuhub that nothing needs, by node: older versions, and families that no profile offers.

    Images that a container uses, those that a profile names, and pinned ones are needed. On the node that builds, the
    images below the current ones are needed too: the next build starts from them.
    """
    builder, offered = choose_builder(cluster), list_offered(cluster)
    current = {BASE, *list_families(cluster)}
    below = {parent for family in current for parent in _list_parents(family)}
    return [
        image
        for image in images
        if not image.containers
        and not offered.intersection(image.names)
        and not any(name.rpartition(":")[2].startswith(PINNED) for name in image.names)
        and not any(
            name == f"{needed}:latest"
            for needed in (current | below if image.node == builder else current)
            for name in image.names
        )
    ]


def _list_parents(image: str) -> Iterator[str]:
    while image in PARENTS:
        image = PARENTS[image]
        yield image


async def remove_images(daemons: DockerClients, images: Sequence[NodeImage]) -> dict[str, int]:
    """Remove images from their nodes, and return the bytes that each node has gained.

    A container that was created since the images were read keeps its image: Docker refuses to remove it.
    """
    by_node: dict[str, list[NodeImage]] = {}
    for image in images:
        by_node.setdefault(image.node, []).append(image)
    freed = await asyncio.gather(
        *(daemons.run(node, partial(_remove, images=unused), kind=CallKind.LONG) for node, unused in by_node.items())
    )
    return dict(zip(by_node, freed, strict=True))


def _remove(client: Any, images: Sequence[NodeImage]) -> int:
    before = _read_disk_usage(client)
    # The newest first: an image below another one cannot be removed before it.
    for image in sorted(images, key=lambda image: image.made_at, reverse=True):
        for name in image.names:
            try:
                client.remove_image(name)
            except docker.errors.APIError as error:
                if error.status_code not in {404, 409}:
                    raise
    return before - _read_disk_usage(client)


def _read_disk_usage(client: Any) -> int:
    usage: Mapping[str, Any] = client.df()
    return int(usage["LayersSize"] or 0)
