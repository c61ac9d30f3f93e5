"""Settings of NCCL, gloo and name look-ups that ranks get without asking: found from the container and its network.

What is set in the container already stays as it is, and the user's own `os.environ` wins in any case.
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
from gpu_launch.quantities import format_memory

#: NCCL's ring buffers and DataLoaders' batches need more of it than this.
LEAST_SHM_MIB = 1024
_SHM = "/dev/shm"  # noqa: S108 - its size is looked at, nothing else
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
#: READ of nvmlGpuP2PCapsIndex_t in nvml.h: nvidia-ml-py 13 defines its own constant as a tuple, which NVML rejects.
_NVML_P2P_READ = 0
_PROBE_S = 0.05  # seconds for a router on the way to refuse a packet
_DISCARD_PORT = 9
_IP_UDP_HEADERS, _MOST_PACKET = 28, 65_535  # bytes
#: From Linux's in.h; Python's socket module has no names for them.
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO, _IP_MTU = 10, 2, 14


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a container. None: not known."""

    #: The one by which the user's other containers are reached.
    interface: str
    gpus: int = 0
    has_infiniband: bool = False
    #: Whether every two of its GPUs read each other's memory.
    has_p2p: bool | None = None
    #: Whether the kernel lets it ask for its NUMA policy.
    has_numa_calls: bool | None = None
    shm_mib: int | None = None
    mtu: int | None = None
    #: The largest packet that gets through to the head.
    path_mtu: int | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One environment variable, and why."""

    name: str
    value: str
    reason: str


def decide(facts: Facts) -> tuple[Setting, ...]:
    """What is set in such a container. Pure."""
    reached = f"{facts.interface} is the interface by which your containers reach each other"
    found = [
        Setting(name="GLOO_SOCKET_IFNAME", value=facts.interface, reason=reached),
        # NCCL takes a name for a beginning of names, unless it follows an equals sign.
        Setting(name="NCCL_SOCKET_IFNAME", value=f"={facts.interface}", reason=reached),
        Setting(
            name="RES_OPTIONS",
            value="timeout:1 attempts:1",
            reason="a lost answer to a reverse look-up would stall a store's connection for 5 s",
        ),
    ]
    if not facts.has_infiniband:
        found.append(Setting(name="NCCL_IB_DISABLE", value="1", reason="no /dev/infiniband"))
    if facts.gpus > 1 and facts.has_p2p is False:
        reason = "NVML says that these GPUs cannot read each other's memory"
        found.append(Setting(name="NCCL_P2P_DISABLE", value="1", reason=reason))
    if facts.gpus and facts.has_numa_calls is False:
        reason = "the container may not make NUMA calls"
        found.append(Setting(name="NCCL_CUMEM_HOST_ENABLE", value="0", reason=reason))
    return tuple(found)


def warn(facts: Facts) -> tuple[str, ...]:
    """What no setting of ours can mend, for a person. Pure."""
    said = []
    if facts.shm_mib is not None and facts.shm_mib < LEAST_SHM_MIB:
        said.append(
            f"{_SHM} has {format_memory(facts.shm_mib)}: NCCL between GPUs of one node and DataLoader workers need "
            f"{format_memory(LEAST_SHM_MIB)} or more. Ask the administrator for a larger `shm`."
        )
    if facts.mtu is not None and facts.path_mtu is not None and facts.path_mtu < facts.mtu:
        said.append(
            f"{facts.interface} sends packets of {facts.mtu} bytes, and the way to the other nodes takes "
            f"{facts.path_mtu}, as a tunnel does: every connection has to find that out. Ask the administrator for "
            f"`mtu = {facts.path_mtu}` in [network]."
        )
    return tuple(said)


def choose(facts: Facts, taken: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables by name, without those that are in `taken`. Pure."""
    return {item.name: item.value for item in decide(facts) if item.name not in (taken or {})}


def find(interface: str) -> dict[str, str]:
    """The variables for ranks in this container."""
    return choose(look(interface), os.environ)


def explain(interface: str) -> dict[str, str]:
    """Why each of them is set."""
    return {item.name: item.reason for item in decide(look(interface)) if item.name not in os.environ}


def look(interface: str, *, far: bool = False) -> Facts:
    """This container; with `far` also how large packets may be, which takes a moment."""
    env = environment.read()
    mtu = _mtu(interface) if far else None
    return Facts(
        interface=interface,
        gpus=len(env.gpu_uuids),
        has_infiniband=Path("/dev/infiniband").exists(),
        has_p2p=_has_p2p(env.gpu_uuids),
        has_numa_calls=_has_numa_calls() if env.gpu_uuids else None,
        shm_mib=_shm_mib(),
        mtu=mtu,
        path_mtu=_path_mtu(env.head_address, mtu) if mtu and env.head_address else None,
    )


def _has_p2p(uuids: tuple[str, ...]) -> bool | None:
    """Whether NVML says so of every two; None for one GPU, parts of GPUs, and where it cannot tell."""
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
            pynvml.nvmlDeviceGetP2PStatus(one, other, _NVML_P2P_READ) == pynvml.NVML_P2P_STATUS_OK
            for one in handles
            for other in handles
            if one is not other
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


def _shm_mib() -> int | None:
    try:
        found = os.statvfs(_SHM)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks // 1024**2


def _mtu(interface: str) -> int | None:
    try:
        # No packet of IP is larger, whatever loopback says.
        return min(_MOST_PACKET, int(Path(f"/sys/class/net/{interface}/mtu").read_text()))
    except (OSError, ValueError):
        return None


def _path_mtu(address: str, mtu: int) -> int | None:
    """The largest packet on the way there, as far as routers tell: one as large as the interface's is sent."""
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
