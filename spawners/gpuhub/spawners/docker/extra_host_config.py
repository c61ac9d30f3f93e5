"""An administrator's additions to notebooks' containers: DockerSpawner's volumes, mounts and extra_host_config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from docker.types import Mount

from gpuhub.common.errors import SettingsError
from gpuhub.docker.containers.container_spec import ContainerSpec

#: Keys of `extra_host_config` that are passed to Docker.
HOST_CONFIG_KEYS = frozenset(
    {"blkio_weight", "dns", "dns_opt", "dns_search", "extra_hosts", "log_config", "oom_score_adj", "sysctls"}
)
_RIGHTS = "containers get no rights beyond those of their user"
_GPUS = "GPUs come from leases alone"
_MOUNTS = "use DockerSpawner.volumes, read_only_volumes or mounts"
_PROFILE = "set {} of a profile in cluster.toml"
_CPUS = _PROFILE.format("`cpus`")
#: What to do instead of the most common other keys.
_REMEDIES: Mapping[str, str] = {
    **dict.fromkeys(("binds", "mounts", "volumes_from"), _MOUNTS),
    **dict.fromkeys(("cpu_count", "cpu_percent", "cpu_period", "cpu_quota", "cpu_shares", "nano_cpus"), _CPUS),
    **dict.fromkeys(("mem_limit", "mem_reservation", "memswap_limit"), _PROFILE.format("`memory`")),
    **dict.fromkeys(("device_requests", "devices", "runtime"), _GPUS),
    **dict.fromkeys(("cap_add", "cap_drop", "privileged", "security_opt"), _RIGHTS),
    **dict.fromkeys(("ipc_mode", "pid_mode", "userns_mode"), _RIGHTS),
    **dict.fromkeys(("links", "network_mode", "port_bindings", "publish_all_ports"), "see [network] in cluster.toml"),
    "pids_limit": _PROFILE.format("`pids`"),
    "shm_size": _PROFILE.format("`shm`"),
    "storage_opt": _PROFILE.format("`disk`"),
    "tmpfs": _PROFILE.format("`tmp`"),
}


def check_host_config(extra: Mapping[str, Any]) -> None:
    """Check that `extra_host_config` has only keys that are passed to Docker.

    Raises:
        SettingsError: A key is not; the text says what to do instead.
    """
    for key in extra:
        if key not in HOST_CONFIG_KEYS:
            remedy = _REMEDIES.get(key, f"it takes {', '.join(sorted(HOST_CONFIG_KEYS))}")
            raise SettingsError(f"extra_host_config: {key!r} is not passed to Docker: {remedy}")


def extend_spec(
    spec: ContainerSpec, *, binds: Mapping[str, Any], mounts: Sequence[Mount], extra: Mapping[str, Any]
) -> ContainerSpec:
    """Return a notebook's container with an administrator's additions.

    Args:
        binds: Folders of the node or volumes, in docker-py's form.

    Raises:
        SettingsError: As `check_host_config`.
    """
    check_host_config(extra)
    added: dict[str, Any] = {**extra}
    if mounts:
        added["mounts"] = [*spec.host_config["mounts"], *mounts]
    if binds:
        added["binds"] = dict(binds)
    return replace(spec, host_config={**spec.host_config, **added})
