"""Facts about a machine, parsed from the answers of its Docker daemon and of `probe.sh`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib import resources
from typing import Any

from gpuhub.common import gpu as gpus
from gpuhub.common import names
from gpuhub.common.errors import GpuhubError
from gpuhub.nodes.agent import CRITICAL_XIDS
from gpuhub.nodes.gpu_health import add_advice, describe_slowdown, find_gpu_failure
from gpuhub.nodes.status import AgentReading, find_power_limits

_PLAIN_PATH = re.compile(r"/[A-Za-z0-9/._-]*")
#: Docker's names of the kernel's access controls that it confines containers with.
_ACCESS_CONTROLS = {"apparmor": "AppArmor", "selinux": "SELinux"}
_DRIVER_ADVICE = "reboot after an update of the driver, or install the driver again"
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
    #: The profile of system calls of its containers; empty where it does not filter them.
    seccomp: str
    #: `AppArmor`, `SELinux`, or empty.
    access_control: str
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
class GpuReport:
    """What a node's GPU agent says about its GPUs."""

    gpus: tuple[GpuFacts, ...] = ()
    #: Why the GPUs are not known, with the remedy; empty where they are.
    error: str = ""
    advice: str = ""
    #: A line for each GPU that fails.
    failed_gpus: tuple[str, ...] = ()
    #: A line for each GPU on which something is not as it should be, with the remedy.
    gpu_warnings: tuple[tuple[str, str], ...] = ()
    #: Whether an agent runs, which needs the driver and the toolkit.
    has_agent: bool = True
    #: NVML's index of each GPU → the most that it may draw, watts; None where NVML does not report it.
    power_limits: Mapping[int, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """The file system of a folder."""

    #: The kernel's number of the device.
    device: int
    #: It is mounted with project quotas.
    has_quota: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """The network port that has the node's address."""

    interface: str
    is_wireless: bool
    #: Mb/s; None where the port has none, or is down.
    speed: int | None
    #: `full`, `half` or `unknown`.
    duplex: str
    #: The highest speed that it supports, Mb/s; None where the kernel does not report it.
    max_speed: int | None


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
    #: None where the node's address is on a virtual interface, or is not found.
    link: LinkFacts | None = None
    #: The port of the node's data address, as `link`; and whether the machine has that address, None if not asked.
    data_link: LinkFacts | None = None
    has_data_address: bool | None = None
    nf_tables: bool | None = None
    #: Whether the kernel can mount NFS version 4, and whether cachefilesd runs; None where that is unknown.
    nfs_client: bool | None = None
    cachefilesd: bool | None = None
    #: Version of NVIDIA's container toolkit: empty where it is unknown, None where the toolkit is missing.
    toolkit: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    #: Why the GPUs cannot be read, with the remedy.
    gpu_error: str = ""
    gpu_advice: str = _DRIVER_ADVICE
    #: A line for each GPU that fails.
    failed_gpus: tuple[str, ...] = ()
    #: A line for each GPU on which something is not as it should be, with the remedy.
    gpu_warnings: tuple[tuple[str, str], ...] = ()
    #: Whether GPUs may be unknown because gpuhub has not been started yet.
    is_unread: bool = False
    #: `host:port` → it can be reached from there; None where no program there could try.
    reach: Mapping[str, bool | None] = field(default_factory=dict)
    #: Account → its number on the machine.
    accounts: Mapping[str, int] = field(default_factory=dict)
    #: Folder → its file system.
    disks: Mapping[str, DiskFacts] = field(default_factory=dict)
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
    own_address: str = "",
    data_address: str = "",
    folders: Iterable[str] = (),
    slurm: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the arguments of `probe.sh`, none of which has a meaning to a shell.

    Args:
        addresses: Hosts and ports to connect to.
        own_address: The machine's address, whose network port is reported; empty for no report.
        data_address: The same of another address of it.
        folders: Folders whose file systems are reported; one with special characters is skipped.
        slurm: Paths for the checks `slurm` and `epilog`; a path with special characters is skipped.

    Raises:
        GpuhubError: A value has a meaning to a shell.
    """
    arguments = [docker_root, head, *(f"tcp:{host}:{port}" for host, port in addresses)]
    if not _PLAIN_PATH.fullmatch(docker_root) or not all(
        _ADDRESS.fullmatch(address)
        for address in (head, own_address or head, data_address or head, *(argument[4:] for argument in arguments[2:]))
    ):
        raise GpuhubError(f"these arguments have a meaning to a shell: {' '.join(arguments)}")
    disks = [f"disk:{folder}" for folder in folders if _PLAIN_PATH.fullmatch(folder)]
    files = [f"{name}:{path}" for name, path in (slurm or {}).items() if _PLAIN_PATH.fullmatch(path)]
    return [
        *arguments,
        *([f"link:{own_address}"] if own_address else []),
        *([f"data:{data_address}"] if data_address else []),
        *(f"account:{name}" for name in accounts if re.fullmatch(names.USERNAME_PATTERN, name)),
        *disks,
        *files,
    ]


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
        link=_parse_link(last_of.get("link", ""), values.get("port", ())),
        data_link=_parse_link(last_of.get("data_link", ""), values.get("port", ())),
        has_data_address=_truth(last_of.get("has_data", "")),
        nf_tables=_truth(last_of.get("nf_tables", "")),
        nfs_client=_truth(last_of.get("nfs_client", "")),
        cachefilesd=_truth(last_of.get("cachefilesd", "")),
        toolkit=last_of.get("toolkit"),
        gpus=tuple(gpu for line in values.get("gpu", ()) if (gpu := _parse_gpu(line)) is not None),
        gpu_error=f"nvidia-smi fails: {last_of['gpu_error']}" if last_of.get("gpu_error") else "",
        reach={
            address: _truth(answer) for answer, _, address in (line.partition(" ") for line in values.get("reach", ()))
        },
        accounts={
            name: int(number)
            for number, _, name in (line.partition(" ") for line in values.get("account", ()))
            if number.isdigit()
        },
        disks={
            folder: DiskFacts(device=int(number), has_quota=quota == "yes")
            for number, quota, folder in (line.split(" ", 2) for line in values.get("disk", ()))
        },
        slurm_devices=last_of.get("slurm_devices", ""),
        epilog=last_of.get("epilog", ""),
    )


def build_docker_facts(
    info: Mapping[str, Any], version: Mapping[str, Any], *, before: float, after: float
) -> DockerFacts:
    """Build the facts from `/info` and `/version`; `/info` was requested between these two times of the head node."""
    components = {component["Name"]: component.get("Version", "") for component in version.get("Components") or ()}
    # Before version 1.25 of the API, Docker listed names alone.
    options = {
        fields.pop("name", str(option)): fields
        for option in info.get("SecurityOptions") or ()
        for fields in [dict(field.split("=", 1) for field in str(option).split(",") if "=" in field)]
    }
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
        is_rootless="rootless" in options,
        has_userns="userns" in options,
        seccomp=options.get("seccomp", {}).get("profile", ""),
        access_control=next((title for name, title in _ACCESS_CONTROLS.items() if name in options), ""),
        live_restore=bool(info.get("LiveRestoreEnabled")),
        swarm_state=str(swarm.get("LocalNodeState") or "inactive"),
        swarm_node=swarm.get("NodeID") or None,
        ahead_s=parse_docker_time(str(info.get("SystemTime") or "")) - (before + after) / 2,
        within_s=(after - before) / 2,
    )


def join_words(value: Any) -> str:
    """Return a list of Docker as text in small letters, for searches."""
    return str(value or "").lower()


def build_gpu_report(reading: AgentReading) -> GpuReport:
    """Build the report from a line of the GPU agent."""
    failures = ((gpu.uuid or f"GPU {gpu.index}", find_gpu_failure(gpu)) for gpu in reading.gpus)
    return GpuReport(
        gpus=tuple(
            GpuFacts(uuid=gpu.uuid, model=gpu.model, memory_mib=gpu.memory_mib, driver=reading.driver or "")
            for gpu in reading.gpus
            if gpu.uuid
        ),
        error="" if reading.error is None else f"NVIDIA's driver fails: {add_advice(reading.error)}",
        advice=_DRIVER_ADVICE,
        failed_gpus=tuple(f"{name} fails: {failure}" for name, failure in failures if failure is not None),
        gpu_warnings=tuple(_list_gpu_warnings(reading)),
        power_limits=find_power_limits(reading.gpus),
    )


def _list_gpu_warnings(reading: AgentReading) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with GPUs that do not fail, with the remedy; MIG devices share what their GPU has."""
    for gpu in {gpu.whole_uuid: gpu for gpu in reading.gpus if gpu.uuid}.values():
        name, xids = f"GPU {gpu.index} ({gpu.model})", (reading.xids or {}).get(gpu.whole_uuid)
        if reading.xids is not None and xids is None:
            yield f"{name}: its driver reports no Xid errors", "its failures are noticed by its other readings alone"
        critical = [error for error in xids or () if error.code in CRITICAL_XIDS]
        if critical:
            codes = ", ".join(f"{error.code} ({error.count} ×)" for error in critical)
            yield (
                f"{name}: Xid {codes} since its GPU agent started",
                "reset the GPU or restart the node; if it was reset, `gpuhub node accept` grants it again",
            )
        if slowdown := describe_slowdown(gpu):
            yield f"{name}: {slowdown}", "it gets no new work until its clocks have been normal for 5 minutes"
        if gpu.loaded_link is not None and gpu.link_limit is not None and gpu.loaded_link.is_below(gpu.link_limit):
            yield (
                f"{name}: its PCIe link under load is {gpu.loaded_link}, of {gpu.link_limit}",
                "check its seat, riser and slot, and how the board divides its lanes",
            )


def parse_docker_time(text: str) -> float:
    """Parse a time as Docker writes it, such as `2026-11-21T17:00:05.123456789+01:00`; return Unix seconds."""
    # Python parses microseconds, not nanoseconds.
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text)).timestamp()


def _parse_gpu(line: str) -> GpuFacts | None:
    parts = [part.strip() for part in line.split(",", 3)]
    if len(parts) != 4:
        return None
    uuid, driver, memory, name = parts
    return GpuFacts(uuid=uuid, driver=driver, memory_mib=_number(memory) or 0, model=gpus.shorten_model(name))


def _parse_link(line: str, ports: Iterable[str]) -> LinkFacts | None:
    parts = line.split(" ")
    if len(parts) != 4:
        return None
    interface, speed, duplex, kind = parts
    max_speeds = dict(port.split(" ", 1) for port in ports if " " in port)
    return LinkFacts(
        interface=interface,
        is_wireless=kind == "wireless",
        # A port without a speed has -1, or 0 with older kernels.
        speed=_number(speed) or None,
        duplex=duplex,
        max_speed=_number(max_speeds.get(interface)),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _truth(text: str) -> bool | None:
    return {"yes": True, "no": False}.get(text)
