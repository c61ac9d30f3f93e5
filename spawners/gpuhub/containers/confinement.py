"""What holds a container in: its rights, its limits, and the GPUs it sees. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from docker.types import DeviceRequest, LogConfig, Ulimit

from gpuhub.errors import SettingsError
from gpuhub.identity import Identity
from gpuhub.settings import Cluster, Profile

_CPU_PERIOD_US = 100_000
#: Only a lease gives GPUs: these names would ask the NVIDIA runtime behind its back, or hide what was leased.
_GPU_VARIABLES = ("NVIDIA_", "CUDA_VISIBLE_DEVICES")
#: What is asked of the driver for a leased GPU.
_DRIVER_PARTS = ("compute", "utility")
#: Devices that an image's own environment could ask the NVIDIA runtime for beside GPUs: of RDMA and of file systems,
#: past every packet filter, of the switch between GPUs, and of memory shared between machines.
_NO_OTHERS = {
    "NVIDIA_GDRCOPY": "disabled",
    "NVIDIA_GDS": "disabled",
    "NVIDIA_IMEX_CHANNELS": "void",
    "NVIDIA_MOFED": "disabled",
    "NVIDIA_NVSWITCH": "disabled",
}
#: The node keeps what its users' programs had in memory nowhere.
NO_CORE = Ulimit(name="core", soft=0, hard=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one container may use."""

    cpus: float
    memory: int
    shm: int
    pids: int
    #: Bytes written outside mounts; None: no limit.
    disk: int | None = None


def profile_limits(profile: Profile) -> Limits:
    """A notebook's limits."""
    return Limits(cpus=profile.cpus, memory=profile.memory, shm=profile.shm, pids=profile.pids, disk=profile.disk)


def job_limits(cluster: Cluster) -> Limits:
    """A worker's limits."""
    jobs = cluster.jobs
    return Limits(cpus=jobs.cpus, memory=jobs.memory, shm=jobs.shm, pids=jobs.pids, disk=jobs.disk)


def build_device_requests(gpu_uuids: Sequence[str]) -> list[DeviceRequest]:
    """Exactly these GPUs; an empty list asks for none, where an empty request would mean all."""
    if not gpu_uuids:
        return []
    return [DeviceRequest(device_ids=list(gpu_uuids), capabilities=[["gpu", *_DRIVER_PARTS]])]


def build_gpu_environment(gpu_uuids: Sequence[str]) -> dict[str, str]:
    """What the NVIDIA runtime reads, whatever the image says of it.

    Docker puts the device request's GPUs behind these variables, and the image's own have the same names: so all that
    reads them finds the same, whether the first or the last counts. Without a request, where that runtime is a node's
    default, an image that says "all" would get all GPUs.
    """
    if not gpu_uuids:
        return {**_NO_OTHERS, "NVIDIA_VISIBLE_DEVICES": "void"}
    return {
        **_NO_OTHERS,
        "NVIDIA_VISIBLE_DEVICES": ",".join(gpu_uuids),
        "NVIDIA_DRIVER_CAPABILITIES": ",".join(_DRIVER_PARTS),
    }


def confine(identity: Identity, limits: Limits) -> dict[str, Any]:
    """What holds for every container of a user."""
    return {
        "group_add": [str(gid) for gid in identity.groups],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "restart_policy": {"Name": "no"},
        # A quota, since Docker refuses `nano_cpus` above what the node has.
        "cpu_period": _CPU_PERIOD_US,
        "cpu_quota": int(limits.cpus * _CPU_PERIOD_US),
        "mem_limit": limits.memory,
        # Equal: no swap.
        "memswap_limit": limits.memory,
        "shm_size": limits.shm,
        "pids_limit": limits.pids,
        "ulimits": [NO_CORE],
        **({} if limits.disk is None else {"storage_opt": {"size": str(limits.disk)}}),
        "log_config": LogConfig(type="json-file", config={"max-size": "10m", "max-file": "3"}),
    }


def refuse_gpu_variables(environment: Mapping[str, str]) -> None:
    """Refuse an environment that meddles with GPUs.

    Raises:
        SettingsError: with the names.
    """
    refused = sorted(name for name in environment if name.startswith(_GPU_VARIABLES))
    if refused:
        raise SettingsError(f"{', '.join(refused)}: GPUs come from leases alone; take it out of Spawner.environment")
