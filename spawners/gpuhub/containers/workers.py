"""A job's worker containers: created, named to the system, started and joined to the user's network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from gpuhub.containers import networks
from gpuhub.containers.arguments import Place, build_worker
from gpuhub.containers.creation import ensure_created, name_user
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.mounting import telling_storage
from gpuhub.guard.container import ensure_guard
from gpuhub.nodes.head import head_address
from gpuhub.paths import Paths
from gpuhub.settings import Cluster
from gpuhub.storage.preparing import prepare_user


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Which worker to start, and where."""

    instance: str
    owner: str
    job_id: str
    #: The run whose folder it reads: the job's own, or the one that the job joins.
    run_id: str
    #: Among the job's workers, from 0.
    index: int
    #: Among those of the run.
    number: int
    lease_id: str
    epoch: int
    node: str
    gpu_uuids: tuple[str, ...]
    image: str
    #: All workers of a detached job as JSON; None for a job that a notebook leads.
    roster: str | None = None
    #: How often the job was preempted.
    preemptions: int = 0
    #: The Slurm job that holds its GPUs; None without Slurm.
    slurm_job: int | None = None
    #: Asked when the container is there and before it is started; raises where it is not to be.
    before_start: Callable[[], Awaitable[None]] | None = field(default=None, compare=False, repr=False)


async def start_worker(daemons: Daemons, cluster: Cluster, paths: Paths, spec: WorkerSpec) -> str:
    """Start a worker's container; its id. One of the same lease and epoch that is there already is adopted.

    Raises:
        NodeUnreachable: the node does not answer; whether the container exists is unknown.
        ImageMissing: the node lacks the image.
        GpuhubError: what else the daemon, or the user's account, stands in the way.
    """
    identity = await prepare_user(cluster.users, cluster.storage, paths.state, spec.owner)
    network, _, _ = await asyncio.gather(
        networks.ensure_user_network(daemons, cluster, spec.instance, spec.owner),
        networks.ensure_access_network(daemons, cluster, spec.instance, spec.node),
        ensure_guard(daemons, cluster, spec.instance, spec.node),
    )
    container = build_worker(
        place=Place(
            instance=spec.instance,
            cluster=cluster,
            node=cluster.node(spec.node),
            gpu_uuids=spec.gpu_uuids,
            subnet=network.subnet,
            head_address=head_address(cluster),
        ),
        identity=identity,
        image=spec.image,
        lease_id=spec.lease_id,
        epoch=spec.epoch,
        job_id=spec.job_id,
        run_id=spec.run_id,
        index=spec.index,
        number=spec.number,
        roster=spec.roster,
        preemptions=spec.preemptions,
        slurm_job=spec.slurm_job,
    )
    async with telling_storage(daemons, spec.node, cluster.storage, spec.owner):
        made = await ensure_created(daemons, spec.node, container, adopt=True)
        if not made.is_running:
            await name_user(daemons, spec.node, made.id, identity, cluster.storage)
            if spec.before_start is not None:
                await spec.before_start()
            await daemons.run(spec.node, lambda client: client.start(made.id), mounting=True)
    # After the start, so that the overlay is joined while the worker's Python starts.
    await networks.connect(daemons, spec.node, made.id, network)
    return made.id
