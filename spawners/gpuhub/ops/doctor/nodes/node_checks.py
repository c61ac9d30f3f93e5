"""Checks of the facts about a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date

from gpuhub.docker.networks import ETHERNET_MTU
from gpuhub.nodes.daemon_identity import SHARED_IDENTITY_REMEDY
from gpuhub.ops.doctor.findings import Finding, failed, ok, warning
from gpuhub.ops.doctor.node_facts import DockerFacts, GpuFacts, HostFacts
from gpuhub.ops.doctor.version_checks import (
    DOCKER_FLOORS,
    MIN_DOCKER,
    TESTED_DOCKER,
    TOOLKIT_FLOOR,
    find_docker_vulnerabilities,
    format_version,
    is_patched_runc,
    parse_version,
)

#: A clock that differs by more is reported, or makes tokens and certificates fail, seconds.
SKEW_NOTED_S = 2.0
MAX_SKEW_S = 30.0
CLOCK_ADVICE = "run chrony or systemd-timesyncd on both machines"
#: The images with PyTorch for CUDA take some 12 GiB, and each new version more until the old ones are removed.
DISK_NOTED_GIB = 25.0
MIN_DISK_GIB = 5.0
_GOOD_DRIVERS = frozenset({"overlay2", "overlayfs", "btrfs", "zfs"})
#: Docker's names of its own profile: `default` up to version 20.10, `builtin` since 23.0.
_SECCOMP_PROFILES = frozenset({"default", "builtin"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnvironment:
    """Facts outside of a node that its checks need."""

    #: The node's address; empty where it is not known.
    address: str = ""
    #: The node's address for the traffic of ranks; empty where it has none of its own.
    data_address: str = ""
    #: Its interface that ranks use themselves; empty where they use overlays alone.
    data_interface: str = ""
    #: The head node's address, and its ports that containers need: name → number.
    head: str
    head_ports: Mapping[str, int] = field(default_factory=dict)
    #: Ports to check on which something listens; the others cannot be checked.
    listening_ports: frozenset[int] = frozenset()
    #: `host:port` of the storage's NFS servers.
    nfs_servers: tuple[str, ...] = ()
    #: The mount options ask for a cache on the node's disk (`fsc`).
    uses_fsc: bool = False
    #: Users' accounts on the head node: name → number.
    accounts: Mapping[str, int] = field(default_factory=dict)
    #: GPUs of other nodes: UUID → node.
    other_gpus: Mapping[str, str] = field(default_factory=dict)
    #: Ids of the other nodes' Docker daemons: id → node.
    other_daemons: Mapping[str, str] = field(default_factory=dict)
    #: The MTU that users' networks are built for, and the one that was measured (None without an answer), bytes.
    mtu: int = ETHERNET_MTU
    measured_mtu: int | None = None
    #: The head node can measure: it has ping.
    can_measure_mtu: bool = True
    #: Ids of the members of gpuhub's Swarm, each with `host:port` as a manager that can be reached, else empty; None
    #: where there is no Swarm, or it is unknown.
    swarm_members: Mapping[str, str] | None = None
    #: How many nodes are to manage it.
    wanted_managers: int = 1
    #: The node is being added.
    is_new: bool = False
    #: What else should not be on Docker's disk: name → folder.
    folders: Mapping[str, str] = field(default_factory=dict)
    #: Users have a folder on Docker's disk.
    has_scratch: bool = False
    #: Image on the node → date of its Debian packages; None where the image does not state it.
    image_dates: Mapping[str, date | None] = field(default_factory=dict)
    has_overlay: bool = True
    #: Whether users' overlays are encrypted, and why the node's kernel cannot do that; None if it can.
    is_encrypted: bool = False
    encryption_error: str | None = None
    has_firewall: bool = True
    #: State and reason in the last status of the node's firewall container; empty where none runs.
    firewall_status: tuple[str, str] = ("", "")
    #: With Slurm: the paths that `probe.sh` checks, by the names of its checks.
    slurm_paths: Mapping[str, str] = field(default_factory=dict)

    @property
    def swarm_managers(self) -> tuple[str, ...]:
        """`host:port` of each other node that manages the Swarm and can be reached."""
        addresses = filter(None, (self.swarm_members or {}).values())
        return tuple(sorted(each for each in addresses if each.rpartition(":")[0] != self.address))


def check_docker(docker: DockerFacts) -> Iterator[Finding]:
    """Check the daemon itself."""
    version = parse_version(docker.version)
    if version is None or version < MIN_DOCKER:
        least = format_version(MIN_DOCKER)
        yield failed("docker", docker.version or "no version", f"Docker Engine {least} or newer is needed")
    elif vulnerabilities := find_docker_vulnerabilities(docker.version):
        floor = format_version(DOCKER_FLOORS[-1][0])
        yield warning(
            "docker",
            f"{docker.version}: by its number, {'; '.join(vulnerabilities)}",
            f"Docker {floor} fixes them, and distributions patch older versions too; gpuhub uses neither. It was run "
            f"with {TESTED_DOCKER} only: try a newer one on one node first",
        )
    else:
        yield ok("docker", docker.version)
    if docker.is_rootless:
        yield failed("docker", "rootless", "GPUs, overlays and NFS volumes need Docker's ordinary daemon, run by root")
    if docker.has_userns:
        yield warning(
            "docker",
            "userns-remap is on: files of users have other numbers in containers",
            "turn it off in daemon.json",
        )
    yield from _check_confinement(docker)
    if docker.runc:
        if is_patched_runc(docker.runc):
            yield ok("runc", docker.runc)
        else:
            yield warning(
                "runc",
                f"{docker.runc}: by its number, vulnerable to CVE-2025-31133, -52565 and -52881",
                "update to 1.2.8, 1.3.3 or newer; distributions patch older versions too, see their changelog",
            )
    if docker.storage_driver in _GOOD_DRIVERS:
        yield ok("layers", docker.storage_driver)
    else:
        yield warning("layers", docker.storage_driver or "unknown", "overlay2 is faster and better tested")
    if docker.cgroup_version == "2":
        yield ok("cgroups", "version 2")
    else:
        yield warning(
            "cgroups",
            f"version {docker.cgroup_version}",
            "it works, but Docker will drop it: boot with systemd.unified_cgroup_hierarchy=1",
        )


def check_identity(docker: DockerFacts, environment: NodeEnvironment) -> Iterator[Finding]:
    """Check that no other node's daemon has the same id: proofs of what runs where rely on it."""
    if docker.id in environment.other_daemons:
        other = environment.other_daemons[docker.id]
        yield failed("identity", f"Docker there has the identity of {other}'s: {docker.id}", SHARED_IDENTITY_REMEDY)


def _check_confinement(docker: DockerFacts) -> Iterator[Finding]:
    """Check what the daemon adds to gpuhub's own limits: gpuhub's containers keep the daemon's profiles."""
    if docker.seccomp in _SECCOMP_PROFILES:
        yield ok("seccomp", "Docker's own profile")
    else:
        yield failed(
            "seccomp",
            f"the profile {docker.seccomp} is the default" if docker.seccomp else "off",
            'containers may use system calls that Docker forbids: remove "seccomp-profile" from daemon.json, boot a '
            "kernel with CONFIG_SECCOMP_FILTER, and restart Docker",
        )
    if docker.access_control:
        yield ok("access control", docker.access_control)
    else:
        yield warning(
            "access control",
            "neither AppArmor nor SELinux: only namespaces, capabilities and seccomp confine containers",
            "turn on the distribution's own, and restart Docker",
        )


def check_clock(docker: DockerFacts) -> Finding:
    """Check the clock against the head node's; the duration of the query is subtracted from the difference."""
    difference = find_skew(docker.ahead_s, docker.within_s)
    value = describe_skew(docker.ahead_s)
    if difference > MAX_SKEW_S:
        return failed("clock", value, CLOCK_ADVICE)
    if difference > SKEW_NOTED_S:
        return warning("clock", value, CLOCK_ADVICE)
    return ok("clock", "as the head node's" if difference == 0 else value)


def find_skew(ahead_s: float, within_s: float) -> float:
    """Return the least difference of two clocks that a reading with this error proves, seconds."""
    return max(0.0, abs(ahead_s) - within_s)


def describe_skew(ahead_s: float) -> str:
    """Return a clock's difference as text, such as `0.1 s ahead of the head node's`."""
    return f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the head node's"


def check_system(host: HostFacts) -> Iterator[Finding]:
    """Check the distribution, its kernel, and the space for images."""
    yield ok("system", ", ".join(part for part in (host.os, f"kernel {host.kernel}") if part))
    if host.free_kib is None:
        yield warning("disk", "the free space for images is unknown", "check Docker's folder with `df`")
    else:
        free = host.free_kib / 1024**2
        value = f"{free:.0f} GiB free for images"
        advice = "remove unused images (`gpuhub image gc`), or give Docker a larger disk (data-root)"
        if free < MIN_DISK_GIB:
            yield failed("disk", value, advice)
        else:
            yield warning("disk", value, advice) if free < DISK_NOTED_GIB else ok("disk", value)


def check_gpus(host: HostFacts, docker: DockerFacts | None, environment: NodeEnvironment) -> Iterator[Finding]:
    """Check NVIDIA's driver, its GPUs, and the toolkit that passes them to containers."""
    if host.is_unread:
        yield warning("gpus", f"not checked: {host.gpu_error}", "`sudo make up` starts it")
    elif host.gpu_error:
        yield failed("gpus", host.gpu_error, host.gpu_advice)
    elif not (host.gpus or host.failed_gpus):
        yield warning("gpus", "NVIDIA's driver reports none", "install NVIDIA's driver, if the machine has a GPU")
    elif host.gpus:
        names = ", ".join(f"{gpu.model} ({round(gpu.memory_mib / 1024)} GB)" for gpu in host.gpus)
        yield ok("gpus", f"{names}; driver {host.gpus[0].driver or 'unknown'}")
    for line in host.failed_gpus:
        yield failed("gpus", line, "it gets no work until it is repaired; `nvidia-smi -q` and dmesg there have more")
    for line, advice in host.gpu_warnings:
        yield warning("gpus", line, advice)
    yield from check_duplicates(host.gpus, environment)
    floor = format_version(TOOLKIT_FLOOR)
    if host.toolkit:
        version = parse_version(host.toolkit)
        if version is not None and version < TOOLKIT_FLOOR:
            yield warning(
                "toolkit",
                f"{host.toolkit}: CVE-2025-23266 allows escapes from containers",
                f"update to {floor} or newer",
            )
        else:
            yield ok("toolkit", host.toolkit)
    elif host.toolkit is not None or (docker is not None and docker.has_nvidia):
        yield ok("toolkit", "installed")
    else:
        build_finding: Callable[[str, str, str], Finding] = (
            failed if host.gpus or (host.gpu_error and not host.is_unread) else warning
        )
        yield build_finding(
            "toolkit",
            "NVIDIA's container toolkit is not installed",
            f"install nvidia-container-toolkit {floor} or newer from NVIDIA's package repository, then "
            "`nvidia-ctk runtime configure --runtime=docker` and restart Docker",
        )


def check_duplicates(gpus: Sequence[GpuFacts], environment: NodeEnvironment) -> Iterator[Finding]:
    """Check that no other node has the same GPU, which means one machine under two names, or a copied disk."""
    for gpu in gpus:
        if gpu.uuid in environment.other_gpus:
            yield failed(
                "gpus",
                f"{gpu.uuid} is on node {environment.other_gpus[gpu.uuid]} too",
                "add a machine only once, under one name and address",
            )


def check_accounts(host: HostFacts, environment: NodeEnvironment) -> Iterator[Finding]:
    """Check that accounts have the head node's numbers, which containers use on every node."""
    conflicts = [
        f"{name} ({environment.accounts[name]} on the head node, {number} there)"
        for name, number in sorted(host.accounts.items())
        if environment.accounts.get(name, number) != number
    ]
    if conflicts:
        yield warning(
            "accounts",
            f"different numbers than on the head node: {', '.join(conflicts)}",
            "give these accounts the same number: otherwise homes belong to other users for those who log in there",
        )
    elif host.accounts:
        yield ok("accounts", f"the same numbers as on the head node: {', '.join(sorted(host.accounts))}")


def check_login(host: HostFacts, *, needs_sudo: bool, is_tls: bool) -> Iterator[Finding]:
    """Check the administrator's rights over SSH."""
    if not is_tls:
        if host.socket == "usable":
            yield ok("rights", f"{host.user} may use Docker's socket")
        elif host.socket == "missing":
            yield failed("rights", "/var/run/docker.sock does not exist", "install Docker Engine, and start it")
        else:
            yield failed(
                "rights",
                f"{host.user} may not use Docker's socket",
                f"there: `sudo usermod -aG docker {host.user}`, then add the node again. That is as good as root",
            )
    if needs_sudo and host.sudo == "no":
        yield failed(
            "rights",
            f"{host.user} needs a password for sudo, or has none",
            "log in as root, or allow sudo without a password until the node is added",
        )
