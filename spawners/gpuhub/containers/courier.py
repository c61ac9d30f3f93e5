"""A user's courier: the container in which their files are read and written."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gpuhub.containers.arguments import build_courier
from gpuhub.containers.creation import ensure_created
from gpuhub.containers.daemons import Daemons
from gpuhub.identity import ensure_home, find_identity
from gpuhub.paths import Paths
from gpuhub.settings import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class CourierSpec:
    """Whose courier to start, and where."""

    owner: str
    node: str
    image: str


async def start_courier(daemons: Daemons, cluster: Cluster, paths: Paths, spec: CourierSpec) -> str:
    """Start the owner's courier on a node; its id. One that is there already is replaced.

    Raises:
        NodeUnreachable: the node does not answer.
        ImageMissing: the node lacks the image.
        GpuhubError: what else the daemon, or the user's account, stands in the way.
    """
    identity = await asyncio.to_thread(find_identity, cluster.users, paths.state, spec.owner)
    await asyncio.to_thread(ensure_home, cluster.storage, identity)
    container = build_courier(
        instance=paths.instance,
        cluster=cluster,
        node=cluster.node(spec.node),
        identity=identity,
        image=spec.image,
    )
    made = await ensure_created(daemons, spec.node, container, adopt=False)
    await daemons.call(spec.node, "start", made.id)
    return made.id
