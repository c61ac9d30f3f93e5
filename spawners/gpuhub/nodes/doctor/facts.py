"""What is known of a machine, as values made of what it says. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import resources
from typing import Any

from gpuhub import gpus, names
from gpuhub.errors import GpuhubError

_PLAIN_PATH = re.compile(r"/[A-Za-z0-9/._-]*")
_ADDRESS = re.compile(r"[0-9A-Za-z.:-]{1,253}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerFacts:
    """What a node's Docker daemon says of itself."""

    version: str
    #: The daemon's own id.
    id: str
    storage_driver: str
    cgroup_version: str
    os: str
    kernel: str
    root: str
    runc: str
    #: Something of NVIDIA's among its runtimes, or CDI devices.
    has_nvidia: bool
    is_rootless: bool
    has_userns: bool
    live_restore: bool
    swarm_state: str
    swarm_node: str | None
    #: How far its clock is ahead of the head node's, and how exactly that is known, seconds.
    ahead_s: float
    within_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """A card as nvidia-smi or the GPU agent lists it."""

    uuid: str
    model: str
    memory_mib: int
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What the machine itself says, by `probe.sh`."""

    user: str = ""
    #: `root`, `yes` (without a password) or `no`.
    sudo: str = "no"
    #: `usable`, `refused` or `missing`.
    socket: str = "missing"
    #: Client's address and port, then the server's, as SSH sees them; empty where it was not asked over SSH.
    ssh: tuple[str, ...] = ()
    os: str = ""
    kernel: str = ""
    systemd: bool = False
    #: How systemd starts Docker; empty where it does not.
    docker_start: str = ""
    free_kib: int | None = None
    #: The interface towards the head node, its kind in the kernel's word (`wireguard`), its MTU in bytes.
    device: str = ""
    device_kind: str = ""
    mtu: int | None = None
    nf_tables: bool | None = None
    #: Version of NVIDIA's container toolkit: empty where it does not say, None where it is not there.
    toolkit: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    #: nvidia-smi's own words when it fails.
    gpu_error: str = ""
    #: `host:port` → whether it can be reached from there; None where nothing there could try.
    reach: Mapping[str, bool | None] = field(default_factory=dict)
    #: Account → its number there.
    accounts: Mapping[str, int] = field(default_factory=dict)
    #: Slurm's cgroup.conf keeps jobs to their devices: `yes`, `no`, `unknown` without that file, else not asked.
    slurm_devices: str = ""
    #: Slurm's Epilog: `ok`, `other` (gpuhub is not named in it), `refused`, `missing`; empty where it was not asked.
    epilog: str = ""


def probe_script() -> str:
    """The text of `probe.sh`."""
    return resources.files("gpuhub.nodes.doctor").joinpath("probe.sh").read_text(encoding="utf-8")


def build_probe_words(
    *,
    docker_root: str,
    head: str,
    places: Iterable[tuple[str, int]],
    accounts: Iterable[str],
    slurm: Mapping[str, str] | None = None,
) -> list[str]:
    """The words after `probe.sh`: none of them means anything to a shell. `slurm` has the paths of the words `slurm`
    and `epilog`; one that is no plain path is not asked for.

    Raises:
        GpuhubError: one would.
    """
    words = [docker_root, head, *(f"tcp:{host}:{port}" for host, port in places)]
    if not _PLAIN_PATH.fullmatch(docker_root) or not all(
        _ADDRESS.fullmatch(each) for each in (head, *(word[4:] for word in words[2:]))
    ):
        raise GpuhubError(f"these cannot be asked of a shell: {' '.join(words)}")
    files = [f"{word}:{path}" for word, path in (slurm or {}).items() if _PLAIN_PATH.fullmatch(path)]
    return [*words, *(f"account:{name}" for name in accounts if re.fullmatch(names.USERNAME_PATTERN, name)), *files]


def parse_probe(text: str) -> HostFacts:
    """The lines of `probe.sh`.

    Raises:
        GpuhubError: it did not come to its end.
    """
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, sign, value = line.partition("=")
        if sign:
            found.setdefault(key.strip(), []).append(value.strip())
    if "end" not in found:
        last = text.strip().splitlines()[-1:] or ["it said nothing"]
        raise GpuhubError(f"the look at the machine broke off: {last[0][:200]}")
    last_of = {key: values[-1] for key, values in found.items()}
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
        gpus=tuple(gpu for line in found.get("gpu", ()) if (gpu := _parse_gpu(line)) is not None),
        gpu_error=last_of.get("gpu_error", ""),
        reach={place: _truth(answer) for answer, _, place in (line.partition(" ") for line in found.get("reach", ()))},
        accounts={
            name: int(number)
            for number, _, name in (line.partition(" ") for line in found.get("account", ()))
            if number.isdigit()
        },
        slurm_devices=last_of.get("slurm_devices", ""),
        epilog=last_of.get("epilog", ""),
    )


def read_docker(info: Mapping[str, Any], version: Mapping[str, Any], *, before: float, after: float) -> DockerFacts:
    """What `/info` and `/version` say; `/info` was asked between these two moments of the head node's clock."""
    components = {each["Name"]: each.get("Version", "") for each in version.get("Components") or ()}
    options = " ".join(info.get("SecurityOptions") or ())
    devices = json_words(info.get("DiscoveredDevices"))
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
        has_nvidia="nvidia" in json_words(list(info.get("Runtimes") or {})) or "nvidia.com" in devices,
        is_rootless="name=rootless" in options,
        has_userns="name=userns" in options,
        live_restore=bool(info.get("LiveRestoreEnabled")),
        swarm_state=str(swarm.get("LocalNodeState") or "inactive"),
        swarm_node=swarm.get("NodeID") or None,
        ahead_s=_ahead(str(info.get("SystemTime") or ""), before, after),
        within_s=(after - before) / 2,
    )


def json_words(value: Any) -> str:
    """Anything that Docker lists, as text to look for a word in."""
    return str(value or "").lower()


def read_agent_gpus(driver: str | None, cards: Sequence[Any]) -> tuple[GpuFacts, ...]:
    """What the GPU agent listed (`GpuReading`s)."""
    return tuple(
        GpuFacts(uuid=card.uuid, model=card.model, memory_mib=card.memory_mib, driver=driver or "") for card in cards
    )


def _ahead(text: str, before: float, after: float) -> float:
    # Nanoseconds are more than Python reads.
    stamp = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text)).timestamp()
    return stamp - (before + after) / 2


def _parse_gpu(line: str) -> GpuFacts | None:
    parts = [part.strip() for part in line.split(",", 3)]
    if len(parts) != 4:
        return None
    uuid, driver, memory, name = parts
    return GpuFacts(uuid=uuid, driver=driver, memory_mib=_number(memory) or 0, model=gpus.short_model(name))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _truth(text: str) -> bool | None:
    return {"yes": True, "no": False}.get(text)
