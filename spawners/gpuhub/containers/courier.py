"""A user's courier: the container in which their files are read and written."""

from __future__ import annotations

from dataclasses import dataclass

from gpuhub.containers.arguments import build_courier
from gpuhub.containers.creation import ensure_created
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.mounting import telling_storage
from gpuhub.paths import Paths
from gpuhub.settings import Cluster
from gpuhub.storage.preparing import prepare_user


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
    identity = await prepare_user(cluster.users, cluster.storage, paths.state, spec.owner, datasets=False)
    container = build_courier(
        instance=paths.instance,
        cluster=cluster,
        node=cluster.node(spec.node),
        identity=identity,
        image=spec.image,
    )
    async with telling_storage(daemons, spec.node, cluster.storage, spec.owner):
        made = await ensure_created(daemons, spec.node, container, adopt=False)
        await daemons.run(spec.node, lambda client: client.start(made.id), mounting=True)
    return made.id
