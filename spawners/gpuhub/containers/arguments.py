"""Lease, profile and identity as the arguments that Docker gets: pure, and the only place where they are decided."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from docker.types import DriverConfig, Mount, Ulimit

from gpuhub import names, urls
from gpuhub.broker.schemas import Lease
from gpuhub.containers.confinement import (
    NO_CORE,
    Limits,
    build_device_requests,
    build_gpu_environment,
    confine,
    job_limits,
    profile_limits,
    refuse_gpu_variables,
)
from gpuhub.identity import Identity
from gpuhub.settings import Cluster, Node, Profile, Storage
from gpuhub.trust import internal

NOTEBOOK_PORT = 8888
WORKER_COMMAND = ("gpu-launch-worker",)
#: Reads and writes files, and gives terminals: in courier containers and in workers.
COURIER_COMMAND = ("gpu-launch-courier",)
DATASETS = "/datasets"
SCRATCH = "/scratch"

_STACK_BYTES = 64 * 1024**2
_MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """All that is decided about a container before a daemon is asked."""

    name: str
    image: str
    hostname: str
    labels: Mapping[str, str]
    environment: Mapping[str, str]
    #: `uid:gid`.
    user: str
    working_dir: str
    command: tuple[str, ...]
    ports: tuple[int, ...]
    #: Keywords of docker-py's `create_host_config`.
    host_config: Mapping[str, Any]

    def create(self, client: Any) -> str:
        """Create the container with a docker-py client; its id. Blocks."""
        created = client.create_container(
            image=self.image,
            command=list(self.command),
            name=self.name,
            hostname=self.hostname,
            labels=dict(self.labels),
            environment=dict(self.environment),
            user=self.user,
            working_dir=self.working_dir,
            ports=list(self.ports),
            host_config=client.create_host_config(**self.host_config),
        )
        return str(created["Id"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a container runs, and what it must know of its surroundings."""

    instance: str
    cluster: Cluster
    node: Node
    gpu_uuids: tuple[str, ...]
    #: The lease has one of so many parts of its GPU, and promises to use so much of its memory at most, MiB; no wall
    #: stands behind the promise.
    gpu_share: int = 1
    memory_cap_mib: int | None = None
    #: CIDR of the user's network.
    subnet: str
    head_address: str


def build_notebook(
    *,
    place: Place,
    lease: Lease,
    profile: Profile,
    identity: Identity,
    environment: Mapping[str, str],
    command: Sequence[str],
) -> ContainerSpec:
    """The notebook container of a granted lease. `environment` is what JupyterHub gives, its token among it.

    Raises:
        SettingsError: `environment` meddles with GPUs.
    """
    refuse_gpu_variables(environment)
    limits = profile_limits(profile)
    return ContainerSpec(
        name=names.notebook_container(place.instance, lease.owner, lease.subject),
        image=profile.image,
        hostname=place.node.name,
        labels={
            **_labels(place, names.KIND_NOTEBOOK, lease.id, lease.epoch, lease.owner),
            **_slurm_labels(lease.slurm_job),
        },
        environment={
            **_threads(limits),
            **environment,
            **_surroundings(place, identity),
            "GPUHUB_LEASE": lease.id,
            **({"GPUHUB_BROKER_CA": internal.NOTEBOOK_BROKER_TRUST} if place.cluster.has_internal_tls else {}),
            "GPUHUB_KEEP_WORKERS_S": str(place.cluster.jobs.keep_workers),
        },
        user=f"{identity.uid}:{identity.gid}",
        working_dir=identity.home,
        command=tuple(command),
        ports=(NOTEBOOK_PORT,),
        host_config={
            **_host_config(place, identity, limits),
            # On the node's own address, never on all of its addresses.
            "port_bindings": {NOTEBOOK_PORT: (place.node.address,)},
        },
    )


def build_worker(
    *,
    place: Place,
    identity: Identity,
    image: str,
    lease_id: str,
    epoch: int,
    job_id: str,
    run_id: str,
    index: int,
    number: int,
    roster: str | None = None,
    preemptions: int = 0,
    slurm_job: int | None = None,
) -> ContainerSpec:
    """One worker container of a job; `number` is its place in the run. It gets no token: it has nothing to ask of
    anybody, not even in a detached job, whose workers are told of each other by `roster`.
    """
    limits = job_limits(place.cluster)
    detached = {} if roster is None else {"GPU_LAUNCH_ROSTER": roster, "GPU_LAUNCH_PREEMPTIONS": str(preemptions)}
    return ContainerSpec(
        name=names.worker_container(place.instance, job_id, index),
        image=image,
        hostname=place.node.name,
        labels={
            **_labels(place, names.KIND_WORKER, lease_id, epoch, identity.name),
            **_slurm_labels(slurm_job),
            names.LABEL_JOB: job_id,
            names.LABEL_WORKER: str(index),
        },
        environment={
            **_threads(limits),
            **_surroundings(place, identity),
            "GPU_LAUNCH_RUN": run_id,
            "GPU_LAUNCH_WORKER": str(number),
            **detached,
        },
        user=f"{identity.uid}:{identity.gid}",
        working_dir=identity.home,
        command=WORKER_COMMAND,
        ports=(),
        host_config=_host_config(place, identity, limits),
    )


def build_courier(*, instance: str, cluster: Cluster, node: Node, identity: Identity, image: str) -> ContainerSpec:
    """The container in which a user's files are read and written: the home, and nothing else."""
    limits = Limits(cpus=1.0, memory=512 * _MIB, shm=16 * _MIB, pids=64)
    return ContainerSpec(
        name=names.courier_container(instance, identity.name),
        image=image,
        hostname=node.name,
        labels={
            names.LABEL_INSTANCE: instance,
            names.LABEL_KIND: names.KIND_COURIER,
            names.LABEL_OWNER: identity.name,
        },
        environment={"HOME": identity.home, "USER": identity.name, **build_gpu_environment(())},
        user=f"{identity.uid}:{identity.gid}",
        # Not the home: a folder that is missing would be made, and this file system is read-only.
        working_dir="/",
        command=(*COURIER_COMMAND, "serve"),
        ports=(),
        host_config={
            **confine(identity, limits),
            "network_mode": "none",
            "device_requests": [],
            "mounts": [build_home_mount(cluster.storage, instance, identity)],
            "read_only": True,
        },
    )


def build_mounts(storage: Storage, instance: str, identity: Identity) -> list[Mount]:
    """Home at `/home/<user>`, datasets read-only at `/datasets`, and the node's own scratch at `/scratch`."""
    mounts = [build_home_mount(storage, instance, identity)]
    if storage.datasets is not None:
        labels = {names.LABEL_INSTANCE: instance, names.LABEL_KIND: names.VOLUME_DATASETS}
        name = f"{instance}-datasets"
        mounts.append(_mount(storage.datasets, DATASETS, storage, name, labels, read_only=True))
    if storage.scratch:
        mounts.append(_scratch_mount(instance, identity))
    return mounts


def build_home_mount(storage: Storage, instance: str, identity: Identity) -> Mount:
    """Home at `/home/<user>`."""
    home = storage.home.replace("{username}", identity.name)
    labels = _volume_labels(instance, identity.name, names.VOLUME_HOME)
    return _mount(home, identity.home, storage, f"{instance}-home-{names.slug(identity.name)}", labels)


def _scratch_mount(instance: str, identity: Identity) -> Mount:
    """A volume of the node's own, which outlives the user's containers; `name_user` makes it theirs."""
    return Mount(
        target=SCRATCH,
        source=names.scratch_volume(instance, identity.name),
        type="volume",
        # Else what an image has there would be copied, with its owner.
        no_copy=True,
        labels=_volume_labels(instance, identity.name, names.VOLUME_SCRATCH),
    )


def _volume_labels(instance: str, owner: str, kind: str) -> dict[str, str]:
    return {names.LABEL_INSTANCE: instance, names.LABEL_KIND: kind, names.LABEL_OWNER: owner}


def _mount(
    place: str, target: str, storage: Storage, volume: str, labels: Mapping[str, str], *, read_only: bool = False
) -> Mount:
    if not place.startswith("nfs://"):
        # Unlike a bind in the old form, Docker refuses this when the folder is missing, and does not make it as root.
        return Mount(target=target, source=place, type="bind", read_only=read_only)
    url = urlsplit(place)
    options = {
        "type": "nfs",
        "o": ",".join(part for part in (f"addr={url.hostname}", storage.nfs_options) if part),
        "device": f":{url.path}",
    }
    # A volume keeps the options it was made with, so other options need another name.
    digest = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()[:8]
    return Mount(
        target=target,
        source=f"{volume}-{digest}",
        type="volume",
        read_only=read_only,
        no_copy=True,
        labels=dict(labels),
        driver_config=DriverConfig("local", options),
    )


def _labels(place: Place, kind: str, lease_id: str, epoch: int, owner: str) -> dict[str, str]:
    labels = {
        names.LABEL_INSTANCE: place.instance,
        names.LABEL_KIND: kind,
        names.LABEL_LEASE: lease_id,
        names.LABEL_EPOCH: str(epoch),
        names.LABEL_OWNER: owner,
    }
    return labels if place.gpu_share == 1 else labels | {names.LABEL_SHARE: str(place.gpu_share)}


def _slurm_labels(job: int | None) -> dict[str, str]:
    return {} if job is None else {names.LABEL_SLURM_JOB: str(job)}


def _surroundings(place: Place, identity: Identity) -> dict[str, str]:
    surroundings = {
        "HOME": identity.home,
        "USER": identity.name,
        "SHELL": "/bin/bash",
        "GPUHUB_BROKER_URL": urls.broker_url(place.cluster, place.head_address),
        "GPUHUB_NETWORK_SUBNET": place.subnet,
        "GPUHUB_NODE": place.node.name,
        "GPUHUB_GPU_UUIDS": ",".join(place.gpu_uuids),
        "GPUHUB_HEAD_ADDRESS": place.head_address,
    }
    if place.memory_cap_mib is not None:
        surroundings["GPUHUB_GPU_MEMORY_CAP_MIB"] = str(place.memory_cap_mib)
    return surroundings | build_gpu_environment(place.gpu_uuids)


def _threads(limits: Limits) -> dict[str, str]:
    """Libraries count the node's cores, not the container's share of them, and then wait for each other."""
    return {"OMP_NUM_THREADS": str(max(1, int(limits.cpus)))}


def _host_config(place: Place, identity: Identity, limits: Limits) -> dict[str, Any]:
    return {
        **confine(identity, limits),
        "network_mode": names.access_network(place.instance),
        "device_requests": build_device_requests(place.gpu_uuids),
        "mounts": build_mounts(place.cluster.storage, place.instance, identity),
        # No memlock: the driver pins CUDA's memory itself, only RDMA would need it, and a daemon that may not raise
        # limits (in a virtual machine or container, say) would refuse to start the container at all.
        "ulimits": [NO_CORE, Ulimit(name="stack", soft=_STACK_BYTES, hard=_STACK_BYTES)],
    }
