"""Security options of containers: their rights, their limits, and the GPUs that they see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from docker.types import DeviceRequest, LogConfig, Ulimit

from gpuhub.broker_api.schemas import ContainerSizeView
from gpuhub.common.errors import SettingsError
from gpuhub.config.containers.container_size import DEFAULT_CPUS, DEFAULT_MEMORY
from gpuhub.config.settings import ClusterSettings, ProfileSettings
from gpuhub.config.users.identity import UserIdentity

_CPU_PERIOD_US = 100_000
_MIB = 1024**2
#: Prefixes of variables that would select GPUs past the lease, or hide leased ones.
_GPU_VARIABLES = ("NVIDIA_", "CUDA_VISIBLE_DEVICES")
#: Driver capabilities that a leased GPU comes with.
_DRIVER_PARTS = ("compute", "utility")
#: An image's environment could request further devices from the NVIDIA runtime: for RDMA and file systems, which bypass
#: the firewall, for the switch between GPUs, and for memory shared between machines.
_DISABLED_DEVICES = {
    "NVIDIA_GDRCOPY": "disabled",
    "NVIDIA_GDS": "disabled",
    "NVIDIA_IMEX_CHANNELS": "void",
    "NVIDIA_MOFED": "disabled",
    "NVIDIA_NVSWITCH": "disabled",
}
#: The only folders of gpuhub's images that every user can write.
TEMPORARY_FOLDERS = ("/tmp", "/var/tmp")  # noqa: S108  inside of containers
#: The node never stores the memory of its users' programs.
NO_CORE_DUMPS = Ulimit(name="core", soft=0, hard=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSize:
    """CPUs, bytes of memory and, if not the usual ones, bytes of shared memory that a job's lease gives a worker."""

    cpus: float = DEFAULT_CPUS
    memory: int = DEFAULT_MEMORY
    shm: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLimits:
    """Limits of one container: CPUs, bytes of memory and shared memory, and processes."""

    cpus: float
    memory: int
    shm: int
    pids: int
    #: Bytes written outside mounts; None means no limit.
    disk: int | None = None
    #: Bytes in each of the folders for temporary files, as configured.
    tmp: int | None = None

    @property
    def tmpfs(self) -> int | None:
        """Return the size of each file system for temporary files; None where `disk` limits them."""
        return self.memory // 2 if self.tmp is None and self.disk is None else self.tmp


def build_profile_limits(profile: ProfileSettings, size: ContainerSizeView | None) -> ContainerLimits:
    """Build the limits of a notebook; `size` is what its lease grants on its node, None if that says nothing."""
    cpus = profile.cpus or DEFAULT_CPUS if size is None else size.cpus
    memory = profile.memory or DEFAULT_MEMORY if size is None else size.memory_mib * _MIB
    return ContainerLimits(
        cpus=cpus,
        memory=memory,
        shm=memory // 2 if profile.shm is None else profile.shm,
        pids=profile.pids,
        disk=profile.disk,
        tmp=profile.tmp,
    )


def build_job_limits(cluster: ClusterSettings, size: WorkerSize) -> ContainerLimits:
    """Build the limits of a worker of this size."""
    jobs = cluster.jobs
    shm = jobs.shm if size.shm is None else size.shm
    return ContainerLimits(
        cpus=size.cpus,
        memory=size.memory,
        shm=size.memory // 2 if shm is None else shm,
        pids=jobs.pids,
        disk=jobs.disk,
        tmp=jobs.tmp,
    )


def build_device_requests(gpu_uuids: Sequence[str]) -> list[DeviceRequest]:
    """Build the request for exactly these GPUs; for none the list is empty, because an empty request means all."""
    if not gpu_uuids:
        return []
    return [DeviceRequest(device_ids=list(gpu_uuids), capabilities=[["gpu", *_DRIVER_PARTS]])]


def build_gpu_environment(gpu_uuids: Sequence[str]) -> dict[str, str]:
    """Build the variables that the NVIDIA runtime reads, so that the image's own have no effect.

    Docker appends the device request's GPUs to these variables, and an image may set the same names. With equal values
    it does not matter whether a reader uses the first or the last. Without them, on a node whose default is the NVIDIA
    runtime, an image that sets "all" would get all GPUs.
    """
    if not gpu_uuids:
        return {**_DISABLED_DEVICES, "NVIDIA_VISIBLE_DEVICES": "void"}
    return {
        **_DISABLED_DEVICES,
        "NVIDIA_VISIBLE_DEVICES": ",".join(gpu_uuids),
        "NVIDIA_DRIVER_CAPABILITIES": ",".join(_DRIVER_PARTS),
    }


def build_tmpfs(limits: ContainerLimits) -> dict[str, str]:
    """Build the file systems in memory for all folders of the image that every user can write.

    Otherwise a user could fill Docker's disk there, which all users of the node share. Programs run from there: torch
    loads what it has compiled.
    """
    if limits.tmpfs is None:
        return {}
    options = f"rw,exec,nosuid,nodev,mode=1777,size={limits.tmpfs}"
    return dict.fromkeys(TEMPORARY_FOLDERS, options)


def build_security_options(identity: UserIdentity, limits: ContainerLimits) -> dict[str, Any]:
    """Build the options that every container of a user has."""
    return {
        "group_add": [str(gid) for gid in identity.groups],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "restart_policy": {"Name": "no"},
        # A quota, because Docker refuses `nano_cpus` above the node's number of CPUs.
        "cpu_period": _CPU_PERIOD_US,
        "cpu_quota": int(limits.cpus * _CPU_PERIOD_US),
        "mem_limit": limits.memory,
        # Equal to mem_limit, so no swap.
        "memswap_limit": limits.memory,
        "shm_size": limits.shm,
        "pids_limit": limits.pids,
        "ulimits": [NO_CORE_DUMPS],
        **({} if limits.disk is None else {"storage_opt": {"size": str(limits.disk)}}),
        "log_config": LogConfig(type="json-file", config={"max-size": "10m", "max-file": "3"}),
    }


def refuse_gpu_variables(environment: Mapping[str, str]) -> None:
    """Refuse an environment that selects GPUs.

    Raises:
        SettingsError: A variable selects GPUs; the text names it.
    """
    refused = sorted(name for name in environment if name.startswith(_GPU_VARIABLES))
    if refused:
        raise SettingsError(f"{', '.join(refused)}: GPUs come from leases alone; take it out of Spawner.environment")
