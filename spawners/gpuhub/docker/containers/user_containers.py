"""Starts containers of users: a job's workers on the user's network, and a courier, which reads and writes files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from gpuhub.common import job_keys
from gpuhub.common.paths import Paths
from gpuhub.common.secrets import JOB_KEY, read_secret
from gpuhub.config.containers.services import ServiceSettings
from gpuhub.config.head_address import find_head_address
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker import networks
from gpuhub.docker.client import CallKind, DockerClients
from gpuhub.docker.containers.container_lifecycle import ensure_created, inject_identity, translate_mount_errors
from gpuhub.docker.containers.container_spec import ContainerContext, build_courier_spec, build_worker_spec
from gpuhub.docker.containers.firewall_container import ensure_firewall
from gpuhub.docker.containers.security import WorkerSize
from gpuhub.docker.containers.service_access import build_worker_environment, issue_worker_certificate
from gpuhub.docker.data_network import join_data_network
from gpuhub.storage.homes import prepare_user


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker to be started: its job, lease, node and GPUs."""

    instance: str
    owner: str
    job_id: str
    #: The run whose folder the worker reads: the job's own, or the one that the job joins.
    run_id: str
    #: Index among the job's workers, from 0.
    index: int
    #: Index among the run's workers.
    run_index: int
    lease_id: str
    epoch: int
    node: str
    gpu_uuids: tuple[str, ...]
    image: str
    size: WorkerSize = field(default_factory=WorkerSize)
    #: All workers of a detached job as JSON; None for a job that runs from a notebook.
    worker_list: str | None = None
    #: Number of times that the job was preempted.
    preemptions: int = 0
    #: How often the job has started again after a failure, and may at most.
    retries: tuple[int, int] = (0, 0)
    #: None for a job that does not sleep.
    times_asleep: int | None = None
    #: Slurm job that holds the GPUs; None without Slurm.
    slurm_job: int | None = None
    #: Further names of the worker in its owner's network.
    aliases: tuple[str, ...] = ()
    #: Volumes with the node's copies of datasets, by dataset.
    staged: Mapping[str, str] = field(default_factory=dict)
    #: Services that set variables in the container. On a guest there are none.
    services: tuple[ServiceSettings, ...] = ()
    #: Called between creation and start of the container; raises when it must not start.
    before_start: Callable[[], Awaitable[None]] | None = field(default=None, compare=False, repr=False)
    #: On a guest: called with the container's id in between, to copy the job's files to the empty home.
    fill_home: Callable[[str], Awaitable[None]] | None = field(default=None, compare=False, repr=False)


async def start_worker(daemons: DockerClients, cluster: ClusterSettings, paths: Paths, spec: WorkerSpec) -> str:
    """Start a worker's container and return its id; an existing one of the same lease and epoch is adopted.

    Raises:
        NodeUnreachable: The node does not answer; the container may exist.
        ImageMissing: The node lacks the image.
        GpuhubError: The daemon refuses, or the user's account cannot be used.
    """
    is_guest = cluster.node(spec.node).guest
    identity = await prepare_user(cluster.users, cluster.storage, paths.state, spec.owner)
    network, _, _ = await asyncio.gather(
        _find_network(daemons, cluster, spec, is_guest=is_guest),
        networks.ensure_access_network(daemons, cluster, spec.instance, spec.node),
        ensure_firewall(daemons, cluster, spec.instance, spec.node),
    )
    access: dict[str, str] = {}
    certificate = None
    if spec.services:
        certificate = await asyncio.to_thread(
            issue_worker_certificate, cluster, paths.internal_certificates, spec.owner
        )
        key = job_keys.build_key(read_secret(paths, JOB_KEY), spec.job_id)
        access = build_worker_environment(key, has_certificate=certificate is not None)
    container_spec = build_worker_spec(
        context=ContainerContext(
            instance=spec.instance,
            cluster=cluster,
            node=cluster.node(spec.node),
            gpu_uuids=spec.gpu_uuids,
            subnet="" if network is None else network.subnet,
            head_address=find_head_address(cluster),
            staged=spec.staged,
            services=spec.services,
        ),
        identity=identity,
        image=spec.image,
        size=spec.size,
        lease_id=spec.lease_id,
        epoch=spec.epoch,
        job_id=spec.job_id,
        run_id=spec.run_id,
        index=spec.index,
        run_index=spec.run_index,
        worker_list=spec.worker_list,
        preemptions=spec.preemptions,
        retries=spec.retries,
        times_asleep=spec.times_asleep,
        slurm_job=spec.slurm_job,
        access=access,
    )
    async with translate_mount_errors(daemons, spec.node, cluster.storage, spec.owner):
        container = await ensure_created(daemons, spec.node, container_spec, adopt=True)
        if not container.is_running:
            await inject_identity(
                daemons,
                spec.node,
                container.id,
                identity,
                cluster.storage,
                certificate=certificate,
                is_guest=is_guest,
            )
            if spec.fill_home is not None:
                await spec.fill_home(container.id)
            if spec.before_start is not None:
                await spec.before_start()
            await daemons.run(spec.node, lambda client: client.start(container.id), kind=CallKind.MOUNTING)
    # After the start, so that the network is connected while the worker's Python starts.
    if network is not None:
        await networks.connect_container(daemons, spec.node, container.id, network, aliases=spec.aliases)
        if "GPUHUB_DATA_SUBNET" in container_spec.environment:
            await join_data_network(daemons, cluster, spec.node, container.id, network)
    return container.id


async def _find_network(
    daemons: DockerClients, cluster: ClusterSettings, spec: WorkerSpec, *, is_guest: bool
) -> networks.UserNetwork | None:
    """Return the owner's network; None for a guest, which would get the keys of an overlay that it is a member of."""
    return None if is_guest else await networks.ensure_user_network(daemons, cluster, spec.instance, spec.owner)


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
        await daemons.run(spec.node, lambda client: client.start(container.id), kind=CallKind.MOUNTING)
    return container.id
