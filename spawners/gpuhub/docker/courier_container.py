"""Starts a user's courier: the container in which their files are read and written."""

from __future__ import annotations

from dataclasses import dataclass

from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import DockerClients
from gpuhub.docker.container_lifecycle import ensure_created
from gpuhub.docker.container_spec import build_courier_spec
from gpuhub.docker.mount_errors import translate_mount_errors
from gpuhub.storage.preparation import prepare_user


@dataclass(frozen=True, slots=True, kw_only=True)
class CourierSpec:
    """A courier to be started: its owner, node and image."""

    owner: str
    node: str
    image: str


async def start_courier(daemons: DockerClients, cluster: ClusterSettings, paths: Paths, spec: CourierSpec) -> str:
    """Start the owner's courier on a node, replacing an existing one, and return its container's id.

    Raises:
        NodeUnreachable: The node does not answer.
        ImageMissing: The node lacks the image.
        GpuhubError: The daemon refuses, or the user's account cannot be used.
    """
    identity = await prepare_user(cluster.users, cluster.storage, paths.state, spec.owner, datasets=False)
    container_spec = build_courier_spec(
        instance=paths.instance,
        cluster=cluster,
        node=cluster.node(spec.node),
        identity=identity,
        image=spec.image,
    )
    async with translate_mount_errors(daemons, spec.node, cluster.storage, spec.owner):
        container = await ensure_created(daemons, spec.node, container_spec, adopt=False)
        await daemons.run(spec.node, lambda client: client.start(container.id), mounting=True)
    return container.id
