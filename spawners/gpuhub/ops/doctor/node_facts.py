"""Facts about a machine, parsed from the answers of its Docker daemon and of `probe.sh`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import resources
from typing import Any

from gpuhub.common import gpu as gpus
from gpuhub.common import names
from gpuhub.common.errors import GpuhubError

_PLAIN_PATH = re.compile(r"/[A-Za-z0-9/._-]*")
_ADDRESS = re.compile(r"[0-9A-Za-z.:-]{1,253}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerFacts:
    """Facts about a node's Docker daemon."""

    version: str
    #: The daemon's id.
    id: str
    storage_driver: str
    cgroup_version: str
    os: str
    kernel: str
    root: str
    runc: str
    #: It has an NVIDIA runtime, or NVIDIA's CDI devices.
    has_nvidia: bool
    is_rootless: bool
    has_userns: bool
    live_restore: bool
    swarm_state: str
    swarm_node: str | None
    #: How far its clock is ahead of the head node's, and the error of that, seconds.
    ahead_s: float
    within_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """A GPU as nvidia-smi or the GPU agent lists it."""

    uuid: str
    model: str
    memory_mib: int
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts about the machine, from `probe.sh`."""

    user: str = ""
    #: `root`, `yes` (without a password) or `no`.
    sudo: str = "no"
    #: `usable`, `refused` or `missing`.
    socket: str = "missing"
    #: Address and port of the SSH client, then of the server; empty without SSH.
    ssh: tuple[str, ...] = ()
    os: str = ""
    kernel: str = ""
    systemd: bool = False
    #: systemd's command that starts Docker; empty where systemd does not start it.
    docker_start: str = ""
    free_kib: int | None = None
    #: The interface towards the head node, the kernel's name of its kind (`wireguard`), its MTU in bytes.
    device: str = ""
    device_kind: str = ""
    mtu: int | None = None
    nf_tables: bool | None = None
    #: Version of NVIDIA's container toolkit: empty where it is unknown, None where the toolkit is missing.
    toolkit: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    #: The error of nvidia-smi when it fails.
    gpu_error: str = ""
    #: `host:port` → it can be reached from there; None where no program there could try.
    reach: Mapping[str, bool | None] = field(default_factory=dict)
    #: Account → its number on the machine.
    accounts: Mapping[str, int] = field(default_factory=dict)
    #: Slurm's cgroup.conf limits jobs to their devices: `yes`, `no`, `unknown` without that file; empty if not checked.
    slurm_devices: str = ""
    #: Slurm's Epilog: `ok`, `other` (it does not name gpuhub), `refused`, `missing`; empty if not checked.
    epilog: str = ""


def read_probe_script() -> str:
    """Return the text of `probe.sh`."""
    return resources.files("gpuhub.ops.doctor").joinpath("probe.sh").read_text(encoding="utf-8")


def build_script_arguments(
    *,
    docker_root: str,
    head: str,
    addresses: Iterable[tuple[str, int]],
    accounts: Iterable[str],
    slurm: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the arguments of `probe.sh`, none of which has a meaning to a shell.

    Args:
        addresses: Hosts and ports to connect to.
        slurm: Paths for the checks `slurm` and `epilog`; a path with special characters is skipped.

    Raises:
        GpuhubError: A value has a meaning to a shell.
    """
    arguments = [docker_root, head, *(f"tcp:{host}:{port}" for host, port in addresses)]
    if not _PLAIN_PATH.fullmatch(docker_root) or not all(
        _ADDRESS.fullmatch(address) for address in (head, *(argument[4:] for argument in arguments[2:]))
    ):
        raise GpuhubError(f"these arguments have a meaning to a shell: {' '.join(arguments)}")
    files = [f"{name}:{path}" for name, path in (slurm or {}).items() if _PLAIN_PATH.fullmatch(path)]
    return [*arguments, *(f"account:{name}" for name in accounts if re.fullmatch(names.USERNAME_PATTERN, name)), *files]


def parse_probe(text: str) -> HostFacts:
    """Parse the output of `probe.sh`.

    Raises:
        GpuhubError: The script did not run to its end.
    """
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, sign, value = line.partition("=")
        if sign:
            values.setdefault(key.strip(), []).append(value.strip())
    if "end" not in values:
        last = text.strip().splitlines()[-1:] or ["it wrote nothing"]
        raise GpuhubError(f"the probe of the machine ended early: {last[0][:200]}")
    last_of = {key: lines[-1] for key, lines in values.items()}
    return HostFacts(
        user=last_of.get("user", ""),
        sudo=last_of.get("sudo", "no"),
        socket=last_of.get("socket", "missing"),
        ssh=tuple(last_of.get("ssh", "").split()),
        os=last_of.get("os", ""),
        kernel=last_of.get("kernel", ""),
        systemd=last_of.get("systemd") == "yes",
        docker_start=last_of.get("docker_start", ""),
        free_kib=_number(last_of.get("free_kib")),
        device=last_of.get("device", ""),
        device_kind=last_of.get("device_kind", ""),
        mtu=_number(last_of.get("mtu")),
        nf_tables=_truth(last_of.get("nf_tables", "")),
        toolkit=last_of.get("toolkit"),
        gpus=tuple(gpu for line in values.get("gpu", ()) if (gpu := _parse_gpu(line)) is not None),
        gpu_error=last_of.get("gpu_error", ""),
        reach={
            address: _truth(answer) for answer, _, address in (line.partition(" ") for line in values.get("reach", ()))
        },
        accounts={
            name: int(number)
            for number, _, name in (line.partition(" ") for line in values.get("account", ()))
            if number.isdigit()
        },
        slurm_devices=last_of.get("slurm_devices", ""),
        epilog=last_of.get("epilog", ""),
    )


def build_docker_facts(
    info: Mapping[str, Any], version: Mapping[str, Any], *, before: float, after: float
) -> DockerFacts:
    """Build the facts from `/info` and `/version`; `/info` was requested between these two times of the head node."""
    components = {component["Name"]: component.get("Version", "") for component in version.get("Components") or ()}
    options = " ".join(info.get("SecurityOptions") or ())
    devices = join_words(info.get("DiscoveredDevices"))
    swarm = info.get("Swarm") or {}
    return DockerFacts(
        version=str(info.get("ServerVersion") or version.get("Version") or ""),
        id=str(info.get("ID") or ""),
        storage_driver=str(info.get("Driver") or ""),
        cgroup_version=str(info.get("CgroupVersion") or "1"),
        os=str(info.get("OperatingSystem") or ""),
        kernel=str(info.get("KernelVersion") or ""),
        root=str(info.get("DockerRootDir") or "/var/lib/docker"),
        runc=str(components.get("runc") or ""),
        has_nvidia="nvidia" in join_words(list(info.get("Runtimes") or {})) or "nvidia.com" in devices,
        is_rootless="name=rootless" in options,
        has_userns="name=userns" in options,
        live_restore=bool(info.get("LiveRestoreEnabled")),
        swarm_state=str(swarm.get("LocalNodeState") or "inactive"),
        swarm_node=swarm.get("NodeID") or None,
        ahead_s=_ahead(str(info.get("SystemTime") or ""), before, after),
        within_s=(after - before) / 2,
    )


def join_words(value: Any) -> str:
    """Return a list of Docker as text in small letters, for searches."""
    return str(value or "").lower()


def build_gpu_facts(driver: str | None, cards: Sequence[Any]) -> tuple[GpuFacts, ...]:
    """Build the facts from the readings of the GPU agent (`GpuReading`)."""
    return tuple(
        GpuFacts(uuid=card.uuid, model=card.model, memory_mib=card.memory_mib, driver=driver or "") for card in cards
    )


def _ahead(text: str, before: float, after: float) -> float:
    # Python parses microseconds, not nanoseconds.
    stamp = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text)).timestamp()
    return stamp - (before + after) / 2


def _parse_gpu(line: str) -> GpuFacts | None:
    parts = [part.strip() for part in line.split(",", 3)]
    if len(parts) != 4:
        return None
    uuid, driver, memory, name = parts
    return GpuFacts(uuid=uuid, driver=driver, memory_mib=_number(memory) or 0, model=gpus.shorten_model(name))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _truth(text: str) -> bool | None:
    return {"yes": True, "no": False}.get(text)
