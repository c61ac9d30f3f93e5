"""Variables for NCCL, gloo and name lookups that ranks get by default, chosen from the container and its network.

Variables that are set in the container stay as they are, and the user's own `os.environ` takes precedence.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_launch import environment
from gpu_launch.units import format_memory

#: Smallest /dev/shm in MiB that NCCL's ring buffers and DataLoaders' batches fit into.
MIN_SHM_MIB = 1024
_SHM = "/dev/shm"  # noqa: S108 - only its size is read
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
#: READ of nvmlGpuP2PCapsIndex_t in nvml.h: nvidia-ml-py 13 defines its own constant as a tuple, which NVML rejects.
_NVML_P2P_READ = 0
_PROBE_S = 0.05  # seconds for a router on the path to reject a packet
_DISCARD_PORT = 9
_IP_UDP_HEADERS, _MAX_PACKET = 28, 65_535  # bytes
#: From Linux's in.h; Python's socket module lacks these names.
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO, _IP_MTU = 10, 2, 14


@dataclass(frozen=True, kw_only=True)
class ContainerFacts:
    """Properties of a container. None means unknown."""

    #: Reaches the user's other containers.
    interface: str
    gpus: int = 0
    has_infiniband: bool = False
    #: Every two of its GPUs can read each other's memory.
    has_p2p: bool | None = None
    #: The kernel lets the container query its NUMA policy.
    has_numa_calls: bool | None = None
    shm_mib: int | None = None
    mtu: int | None = None
    #: The largest packet in bytes that reaches the head node.
    path_mtu: int | None = None


@dataclass(frozen=True, kw_only=True)
class RankSetting:
    """An environment variable for ranks, with the reason."""

    name: str
    value: str
    reason: str


def decide_settings(facts: ContainerFacts) -> tuple[RankSetting, ...]:
    """Choose the variables for such a container."""
    reachable = f"{facts.interface} is the interface through which your containers reach each other"
    settings = [
        RankSetting(name="GLOO_SOCKET_IFNAME", value=facts.interface, reason=reachable),
        # NCCL takes a name as a prefix unless it follows an equals sign.
        RankSetting(name="NCCL_SOCKET_IFNAME", value=f"={facts.interface}", reason=reachable),
        RankSetting(
            name="RES_OPTIONS",
            value="timeout:1 attempts:1",
            reason="a lost answer to a reverse lookup would stall a store's connection for 5 s",
        ),
    ]
    if not facts.has_infiniband:
        settings.append(RankSetting(name="NCCL_IB_DISABLE", value="1", reason="no /dev/infiniband"))
    if facts.gpus > 1 and facts.has_p2p is False:
        reason = "NVML says that these GPUs cannot read each other's memory"
        settings.append(RankSetting(name="NCCL_P2P_DISABLE", value="1", reason=reason))
    if facts.gpus and facts.has_numa_calls is False:
        reason = "the container may not make NUMA calls"
        settings.append(RankSetting(name="NCCL_CUMEM_HOST_ENABLE", value="0", reason=reason))
    return tuple(settings)


def build_warnings(facts: ContainerFacts) -> tuple[str, ...]:
    """Return warnings for a person about problems that no variable can solve."""
    warnings = []
    if facts.shm_mib is not None and facts.shm_mib < MIN_SHM_MIB:
        warnings.append(
            f"{_SHM} has {format_memory(facts.shm_mib)}: NCCL between GPUs of one node and DataLoader workers need "
            f"{format_memory(MIN_SHM_MIB)} or more. Ask the administrator for a larger `shm`."
        )
    if facts.mtu is not None and facts.path_mtu is not None and facts.path_mtu < facts.mtu:
        warnings.append(
            f"{facts.interface} sends packets of {facts.mtu} bytes, but the path to the other nodes takes only "
            f"{facts.path_mtu}, as with a tunnel: every connection has to discover that. Ask the administrator to set "
            f"`mtu = {facts.path_mtu}` in [network]."
        )
    return tuple(warnings)


def choose_variables(facts: ContainerFacts, already_set: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables by name, without those in `already_set`."""
    return {
        setting.name: setting.value for setting in decide_settings(facts) if setting.name not in (already_set or {})
    }


def find_variables(interface: str) -> dict[str, str]:
    """Return the variables for ranks in this container."""
    return choose_variables(inspect_container(interface), os.environ)


def inspect_container(interface: str, *, with_path_mtu: bool = False) -> ContainerFacts:
    """Inspect this container. `with_path_mtu` also measures packet sizes, which takes a moment."""
    env = environment.read()
    # The path to the head node is another one than that of the data network.
    mtu = _read_mtu(interface) if with_path_mtu and env.data_subnet is None else None
    return ContainerFacts(
        interface=interface,
        gpus=len(env.gpu_uuids),
        has_infiniband=Path("/dev/infiniband").exists(),
        has_p2p=_has_p2p(env.gpu_uuids),
        has_numa_calls=_has_numa_calls() if env.gpu_uuids else None,
        shm_mib=_read_shm_mib(),
        mtu=mtu,
        path_mtu=_probe_path_mtu(env.head_address, mtu) if mtu and env.head_address else None,
    )


def _has_p2p(uuids: tuple[str, ...]) -> bool | None:
    """Return NVML's answer for all pairs; None for one GPU, MIG devices, and if NVML does not answer."""
    if len(uuids) < 2 or not all(uuid.startswith("GPU-") for uuid in uuids):
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        return all(
            pynvml.nvmlDeviceGetP2PStatus(first, second, _NVML_P2P_READ) == pynvml.NVML_P2P_STATUS_OK
            for first in handles
            for second in handles
            if first is not second
        )
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _has_numa_calls() -> bool | None:
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None:
        return None
    libc: Any = ctypes.CDLL(None)
    return bool(libc.syscall(number, None, None, 0, None, 0) == 0)


def _read_shm_mib() -> int | None:
    try:
        status = os.statvfs(_SHM)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks // 1024**2


def _read_mtu(interface: str) -> int | None:
    try:
        # IP allows no larger packet, even if loopback reports one.
        return min(_MAX_PACKET, int(Path(f"/sys/class/net/{interface}/mtu").read_text()))
    except (OSError, ValueError):
        return None


def _probe_path_mtu(address: str, mtu: int) -> int | None:
    """Return the largest packet for the path as far as routers report it, by sending one of the interface's size."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
            probe.connect((address, _DISCARD_PORT))
            with contextlib.suppress(OSError):
                probe.send(bytes(mtu - _IP_UDP_HEADERS))
            time.sleep(_PROBE_S)
            return probe.getsockopt(socket.IPPROTO_IP, _IP_MTU)
        except OSError:
            return None
