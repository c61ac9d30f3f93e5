"""Specifications of containers: Docker's arguments, derived from lease, profile and identity, are decided only here.

What is mounted is in `mounts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from docker.types import Ulimit

from gpuhub.broker_api.schemas import LeaseView
from gpuhub.common import names
from gpuhub.common.names import NOTEBOOK_PORT
from gpuhub.config.containers.services import ServiceSettings
from gpuhub.config.head_address import build_broker_url
from gpuhub.config.settings import ClusterSettings, NodeSettings, ProfileSettings
from gpuhub.config.users.identity import UserIdentity
from gpuhub.docker.containers.mounts import MODELS, build_guest_home_mount, build_home_mount, build_mounts
from gpuhub.docker.containers.security import (
    NO_CORE_DUMPS,
    ContainerLimits,
    WorkerSize,
    build_device_requests,
    build_gpu_environment,
    build_job_limits,
    build_profile_limits,
    build_security_options,
    build_tmpfs,
    refuse_gpu_variables,
)
from gpuhub.docker.containers.service_access import build_service_environment
from gpuhub.tls import internal_certificates

BASE_IMAGE = "gpuhub/base:latest"
WORKER_COMMAND = ("gpu-launch-worker",)
#: Reads and writes files and opens terminals, in courier containers and in workers.
COURIER_COMMAND = ("gpu-launch-courier",)

#: A guest's containers reach neither hub nor broker, and their user's other containers neither.
_GUEST_ENVIRONMENT = {"GPUHUB_GUEST": "1"}
_STACK_BYTES = 64 * 1024**2
_MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """Everything about a container that is decided before a daemon is called."""

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
        """Create the container with a docker-py client and return its id. Blocks."""
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
class ContainerContext:
    """Node, GPUs and network of a container."""

    instance: str
    cluster: ClusterSettings
    node: NodeSettings
    gpu_uuids: tuple[str, ...]
    #: The lease has one of `gpu_share` parts of its GPU and promises to use at most `memory_cap_mib` MiB of its memory.
    #: Nothing enforces the promise.
    gpu_share: int = 1
    memory_cap_mib: int | None = None
    #: CIDR of the user's network.
    subnet: str
    head_address: str
    #: Volumes with the node's copies of datasets, by dataset, such as `datasets/imagenet`.
    staged: Mapping[str, str] = field(default_factory=dict)
    #: Services that set variables in the container.
    services: tuple[ServiceSettings, ...] = ()


def build_notebook_spec(
    *,
    context: ContainerContext,
    lease: LeaseView,
    profile: ProfileSettings,
    identity: UserIdentity,
    environment: Mapping[str, str],
    command: Sequence[str],
) -> ContainerSpec:
    """Build the notebook container of a granted lease.

    Args:
        environment: JupyterHub's variables, among them the server's token.

    Raises:
        SettingsError: `environment` sets a variable that selects GPUs.
    """
    refuse_gpu_variables(environment)
    size = next((size for size in lease.sizes if size.node == context.node.name), None)
    limits = build_profile_limits(profile, size)
    return ContainerSpec(
        name=names.notebook_container_name(context.instance, lease.owner, lease.subject),
        image=profile.image,
        hostname=context.node.name,
        labels={
            **_labels(context, names.KIND_NOTEBOOK, lease.id, lease.epoch, lease.owner),
            **_slurm_labels(lease.slurm_job),
        },
        environment={
            **_thread_environment(limits),
            **environment,
            **_context_environment(context, identity),
            "GPUHUB_LEASE": lease.id,
            **(
                {"GPUHUB_BROKER_CA": internal_certificates.NOTEBOOK_BROKER_TRUST}
                if context.cluster.has_internal_tls
                else {}
            ),
            "GPUHUB_KEEP_WORKERS_S": str(context.cluster.jobs.keep_workers),
            # A notebook without a GPU has no ranks.
            **(_data_environment(context) if context.gpu_uuids else {}),
            # Its launches run in the same image.
            **({"GPUHUB_IMAGE": profile.image} if profile.images else {}),
        },
        user=f"{identity.uid}:{identity.gid}",
        working_dir=identity.home,
        command=tuple(command),
        ports=(NOTEBOOK_PORT,),
        host_config={
            **_host_config(context, identity, limits),
            # On the node's own address, never on all of its addresses.
            "port_bindings": {NOTEBOOK_PORT: (context.node.address,)},
        },
    )


def build_worker_spec(
    *,
    context: ContainerContext,
    identity: UserIdentity,
    image: str,
    size: WorkerSize,
    lease_id: str,
    epoch: int,
    job_id: str,
    run_id: str,
    index: int,
    run_index: int,
    worker_list: str | None = None,
    preemptions: int = 0,
    retries: tuple[int, int] = (0, 0),
    times_asleep: int | None = None,
    slurm_job: int | None = None,
    access: Mapping[str, str] | None = None,
) -> ContainerSpec:
    """Build one worker container of a job.

    It gets no token, because a worker calls no API.

    Args:
        worker_list: All workers of a detached job as JSON, for its driver; None for other jobs.
        access: Variables with which it reaches services.
        run_index: The worker's index in the run.
        retries: How often a detached job has started again after a failure, and may at most.
        times_asleep: How often it has slept; None if it does not.
    """
    limits = build_job_limits(context.cluster, size)
    detached = (
        {} if worker_list is None else {"GPU_LAUNCH_ROSTER": worker_list, "GPU_LAUNCH_PREEMPTIONS": str(preemptions)}
    )
    if worker_list is not None and retries[1]:
        detached["GPU_LAUNCH_RETRIES"] = f"{retries[0]}/{retries[1]}"
    if worker_list is not None and times_asleep is not None:
        detached["GPU_LAUNCH_SLEEPS"] = str(times_asleep)
    return ContainerSpec(
        name=names.worker_container_name(context.instance, job_id, index),
        image=image,
        hostname=context.node.name,
        labels={
            **_labels(context, names.KIND_WORKER, lease_id, epoch, identity.name),
            **_slurm_labels(slurm_job),
            names.LABEL_JOB: job_id,
            names.LABEL_WORKER: str(index),
        },
        environment={
            **_thread_environment(limits),
            **_context_environment(context, identity),
            **_data_environment(context),
            "GPU_LAUNCH_RUN": run_id,
            "GPU_LAUNCH_WORKER": str(run_index),
            **(access or {}),
            **detached,
        },
        user=f"{identity.uid}:{identity.gid}",
        working_dir=identity.home,
        command=WORKER_COMMAND,
        ports=(),
        host_config=_host_config(context, identity, limits),
    )


def build_courier_spec(
    *, instance: str, cluster: ClusterSettings, node: NodeSettings, identity: UserIdentity, image: str
) -> ContainerSpec:
    """Build the container in which a user's files are read and written; only the home is mounted."""
    limits = ContainerLimits(cpus=1.0, memory=512 * _MIB, shm=16 * _MIB, pids=64)
    return ContainerSpec(
        name=names.courier_container_name(instance, identity.name),
        image=image,
        hostname=node.name,
        labels={
            names.LABEL_INSTANCE: instance,
            names.LABEL_KIND: names.KIND_COURIER,
            names.LABEL_OWNER: identity.name,
        },
        environment={"HOME": identity.home, "USER": identity.name, **build_gpu_environment(())},
        user=f"{identity.uid}:{identity.gid}",
        # Not the home: Docker would make a missing folder, and this file system is read-only.
        working_dir="/",
        command=(*COURIER_COMMAND, "serve"),
        ports=(),
        host_config={
            **build_security_options(identity, limits),
            "network_mode": "none",
            "device_requests": [],
            "mounts": [build_home_mount(cluster.storage, instance, identity)],
            "read_only": True,
        },
    )


def _labels(context: ContainerContext, kind: str, lease_id: str, epoch: int, owner: str) -> dict[str, str]:
    labels = {
        names.LABEL_INSTANCE: context.instance,
        names.LABEL_KIND: kind,
        names.LABEL_LEASE: lease_id,
        names.LABEL_EPOCH: str(epoch),
        names.LABEL_OWNER: owner,
    }
    return labels if context.gpu_share == 1 else labels | {names.LABEL_SHARE: str(context.gpu_share)}


def _slurm_labels(job: int | None) -> dict[str, str]:
    return {} if job is None else {names.LABEL_SLURM_JOB: str(job)}


def _context_environment(context: ContainerContext, identity: UserIdentity) -> dict[str, str]:
    environment = {
        "HOME": identity.home,
        "USER": identity.name,
        "SHELL": "/bin/bash",
        "GPUHUB_NODE": context.node.name,
        "GPUHUB_GPU_UUIDS": ",".join(context.gpu_uuids),
        **(_GUEST_ENVIRONMENT if context.node.guest else _own_node_environment(context)),
        **({"GPUHUB_STAGED": ",".join(sorted(context.staged))} if context.staged else {}),
    }
    if context.memory_cap_mib is not None:
        environment["GPUHUB_GPU_MEMORY_CAP_MIB"] = str(context.memory_cap_mib)
    return environment | build_gpu_environment(context.gpu_uuids)


def _own_node_environment(context: ContainerContext) -> dict[str, str]:
    return {
        "GPUHUB_BROKER_URL": build_broker_url(context.cluster, context.head_address),
        "GPUHUB_NETWORK_SUBNET": context.subnet,
        "GPUHUB_HEAD_ADDRESS": context.head_address,
        **build_service_environment(context.services),
        **build_model_environment(context.cluster, MODELS),
    }


def _data_environment(context: ContainerContext) -> dict[str, str]:
    """Return the variable by which ranks find their interface on the node's own network card, where they have one."""
    has_one = context.cluster.has_data_network and not context.node.guest
    return {"GPUHUB_DATA_SUBNET": context.cluster.network.data_pool} if has_one else {}


def build_model_environment(cluster: ClusterSettings, folder: str) -> dict[str, str]:
    """Return the variables for programs that load models of the cluster's folder, which is here in the container.

    Where containers have no way to the internet, Hugging Face's libraries would wait for it at each load.
    """
    if cluster.storage.models is None:
        return {}
    offline = {"HF_HUB_OFFLINE": "1"} if cluster.network.egress == "none" else {}
    return {"GPUHUB_MODELS": folder, **offline}


def _thread_environment(limits: ContainerLimits) -> dict[str, str]:
    """Limit threads: libraries would count the node's cores instead of the container's share and slow each other."""
    return {"OMP_NUM_THREADS": str(max(1, int(limits.cpus)))}


def _host_config(context: ContainerContext, identity: UserIdentity, limits: ContainerLimits) -> dict[str, Any]:
    # Ranks that compute on CPUs alone have no use for it.
    fabric = context.node.fabric if context.gpu_uuids else ()
    return {
        **build_security_options(identity, limits),
        "network_mode": names.access_network_name(context.instance),
        "device_requests": build_device_requests(context.gpu_uuids),
        "mounts": (
            [build_guest_home_mount(identity)]
            if context.node.guest
            else build_mounts(context.cluster.storage, context.instance, identity, context.staged)
        ),
        "tmpfs": build_tmpfs(limits),
        # No memlock without a fabric: the driver pins CUDA's memory itself, only RDMA needs it, and a daemon that may
        # not raise limits (in a virtual machine, for example) would refuse to start the container.
        "ulimits": [
            NO_CORE_DUMPS,
            Ulimit(name="stack", soft=_STACK_BYTES, hard=_STACK_BYTES),
            *([Ulimit(name="memlock", soft=-1, hard=-1)] if fabric else []),
        ],
        # Read and write, but not mknod.
        **({"devices": [f"{device}:{device}:rw" for device in fabric]} if fabric else {}),
    }
