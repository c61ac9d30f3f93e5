"""What facts about a node mean: findings, each with what to do. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuhub.containers.mtu import LEAST, USUAL, VXLAN_HEADER
from gpuhub.nodes.doctor import versions
from gpuhub.nodes.doctor.facts import DockerFacts, GpuFacts, HostFacts
from gpuhub.nodes.doctor.findings import Finding, failed, ok, warning

#: A clock that differs by so much is noted, or makes tokens and certificates fail, seconds.
SKEW_NOTED_S = 2.0
SKEW_TOO_MUCH_S = 30.0
#: The images with PyTorch for CUDA take some 12 GiB, and each change of theirs more until the old ones are removed.
DISK_NOTED_GIB = 25.0
DISK_TOO_LITTLE_GIB = 5.0
_GOOD_DRIVERS = frozenset({"overlay2", "overlayfs", "btrfs", "zfs"})
#: How interfaces of tunnels begin; user-space WireGuard has no kind of its own.
_TUNNELS = {"wg": "WireGuard", "tailscale": "Tailscale", "utun": "a tunnel", "tun": "a tunnel"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What the head node knows around a node that is looked at."""

    #: The head node's address, and the ports there that containers need: name → number.
    head: str
    head_ports: Mapping[str, int] = field(default_factory=dict)
    #: Those on which something listens at present; nothing can be said of the others.
    listening: frozenset[int] = frozenset()
    #: `host:port` of the storage's NFS servers.
    nfs: tuple[str, ...] = ()
    #: Users' accounts on the head node: name → number.
    accounts: Mapping[str, int] = field(default_factory=dict)
    #: GPUs of other nodes: UUID → node.
    other_gpus: Mapping[str, str] = field(default_factory=dict)
    #: The MTU that users' networks reckon with, bytes; and what passed whole when it was tried, None where nothing did.
    mtu: int = USUAL
    passed_mtu: int | None = None
    #: `host:port` where the first node, another one, keeps the Swarm.
    manager: str | None = None
    #: Ids of the members of gpuhub's Swarm; None where there is none, or it is not known.
    members: frozenset[str] | None = None
    #: It is about to be added.
    is_new: bool = False
    has_overlay: bool = True
    has_guard: bool = True
    #: State and reason in what the node's guard last said; empty where none runs.
    guard: tuple[str, str] = ("", "")
    #: With Slurm: the paths that `probe.sh` is asked for, by its words.
    slurm: Mapping[str, str] = field(default_factory=dict)


def check_docker(docker: DockerFacts) -> Iterator[Finding]:
    """The daemon itself."""
    version = versions.parse_version(docker.version)
    if version is None or version < versions.DOCKER_LEAST:
        least = versions.format_version(versions.DOCKER_LEAST)
        yield failed("docker", docker.version or "no version", f"Docker Engine {least} or newer is needed")
    elif holes := versions.docker_holes(docker.version):
        floor = versions.format_version(versions.DOCKER_FLOORS[-1][0])
        yield warning(
            "docker",
            f"{docker.version}: by its number, {'; '.join(holes)}",
            f"update to {floor} or newer; distributions repair older versions too, and gpuhub uses neither",
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
    if docker.runc:
        if versions.is_safe_runc(docker.runc):
            yield ok("runc", docker.runc)
        else:
            yield warning(
                "runc",
                f"{docker.runc}: by its number, open to CVE-2025-31133, -52565 and -52881",
                "update to 1.2.8, 1.3.3 or newer; distributions repair older versions too, see their changelog",
            )
    if docker.storage_driver in _GOOD_DRIVERS:
        yield ok("layers", docker.storage_driver)
    else:
        yield warning("layers", docker.storage_driver or "not known", "overlay2 is faster and better tried")
    if docker.cgroup_version == "2":
        yield ok("cgroups", "version 2")
    else:
        yield warning(
            "cgroups",
            f"version {docker.cgroup_version}",
            "works; Docker drops it: boot with systemd.unified_cgroup_hierarchy=1",
        )


def check_clock(docker: DockerFacts) -> Finding:
    """Against the head node's; the slowness of the answer is in its favour."""
    apart = max(0.0, abs(docker.ahead_s) - docker.within_s)
    side = "ahead of" if docker.ahead_s > 0 else "behind"
    value = f"{abs(docker.ahead_s):.1f} s {side} the head node's"
    advice = "run chrony or systemd-timesyncd on both machines"
    if apart > SKEW_TOO_MUCH_S:
        return failed("clock", value, advice)
    if apart > SKEW_NOTED_S:
        return warning("clock", value, advice)
    return ok("clock", "as the head node's" if apart == 0 else value)


def check_system(host: HostFacts) -> Iterator[Finding]:
    """The distribution and its kernel, and room for images."""
    yield ok("system", ", ".join(part for part in (host.os, f"kernel {host.kernel}") if part))
    if host.free_kib is None:
        yield warning("disk", "nobody could tell how much is free for images", "look with `df` at Docker's folder")
    else:
        free = host.free_kib / 1024**2
        value = f"{free:.0f} GiB free for images"
        advice = "remove images that nobody uses (`docker image prune`), or give Docker a larger disk (data-root)"
        if free < DISK_TOO_LITTLE_GIB:
            yield failed("disk", value, advice)
        else:
            yield warning("disk", value, advice) if free < DISK_NOTED_GIB else ok("disk", value)


def check_gpus(host: HostFacts, docker: DockerFacts | None, around: Around) -> Iterator[Finding]:
    """NVIDIA's driver, its cards, and the toolkit that gives them to containers."""
    if host.gpu_error:
        yield failed(
            "gpus", f"nvidia-smi fails: {host.gpu_error}", "reboot after a driver's update, or install the driver anew"
        )
    elif not host.gpus:
        yield warning("gpus", "none that NVIDIA's driver knows", "install NVIDIA's driver, if the machine has a card")
    else:
        cards = ", ".join(f"{gpu.model} ({round(gpu.memory_mib / 1024)} GB)" for gpu in host.gpus)
        yield ok("gpus", f"{cards}; driver {host.gpus[0].driver or 'not told'}")
    yield from check_duplicates(host.gpus, around)
    floor = versions.format_version(versions.TOOLKIT_FLOOR)
    if host.toolkit:
        version = versions.parse_version(host.toolkit)
        if version is not None and version < versions.TOOLKIT_FLOOR:
            yield warning(
                "toolkit", f"{host.toolkit}: CVE-2025-23266 leads out of containers", f"update to {floor} or newer"
            )
        else:
            yield ok("toolkit", host.toolkit)
    elif host.toolkit is not None or (docker is not None and docker.has_nvidia):
        yield ok("toolkit", "there")
    else:
        say: Callable[[str, str, str], Finding] = failed if host.gpus else warning
        yield say(
            "toolkit",
            "NVIDIA's container toolkit is not there",
            f"install nvidia-container-toolkit {floor} or newer from NVIDIA's package repository, then "
            "`nvidia-ctk runtime configure --runtime=docker` and restart Docker",
        )


def check_duplicates(cards: Sequence[GpuFacts], around: Around) -> Iterator[Finding]:
    """One card is in one machine: the same UUID on two means one machine under two names, or a copied disk."""
    for gpu in cards:
        if gpu.uuid in around.other_gpus:
            yield failed(
                "gpus",
                f"{gpu.uuid} is on node {around.other_gpus[gpu.uuid]} too",
                "a machine is added once, under one name and address",
            )


def check_reach(host: HostFacts, around: Around) -> Iterator[Finding]:
    """What the node and its containers need to reach from there."""
    for name, port in around.head_ports.items():
        place = f"{around.head}:{port}"
        if host.reach.get(place) or port in around.listening:
            advice = f"let TCP {port} of the head node through its firewall"
            yield _check_place(host, name, place, f"the {name} on the head node", advice)
        else:
            why = f"the {name} at {place} was not tried: nothing listens there at present"
            yield warning(name, why, "`sudo make up`, then `gpuhub doctor`")
    if around.manager is not None and around.members is not None:
        advice = "let TCP 2377 and 7946 and UDP 7946 and 4789 through between all nodes"
        yield _check_place(host, "nodes", around.manager, "the first node", advice)
    for place in around.nfs:
        yield _check_place(host, "storage", place, "the file server", "let it through the server's firewall")


def _check_place(host: HostFacts, check: str, place: str, what: str, advice: str) -> Finding:
    answer = host.reach.get(place)
    if answer is None:
        return warning(check, f"{what} at {place} was not tried", "bash, nc or python3 there could try")
    if answer:
        return ok(check, f"{what} can be reached at {place}")
    return failed(check, f"{what} cannot be reached at {place} from there", advice)


def check_accounts(host: HostFacts, around: Around) -> Iterator[Finding]:
    """Containers use the head node's numbers on every node; a local account with another one owns other files."""
    apart = [
        f"{name} ({around.accounts[name]} on the head node, {number} there)"
        for name, number in sorted(host.accounts.items())
        if around.accounts.get(name, number) != number
    ]
    if apart:
        yield warning(
            "accounts",
            f"other numbers than on the head node: {', '.join(apart)}",
            "give these accounts the same number, or files of homes belong to others when somebody logs in there",
        )
    elif host.accounts:
        yield ok("accounts", f"the same numbers as on the head node: {', '.join(sorted(host.accounts))}")


def check_network(host: HostFacts, around: Around) -> Iterator[Finding]:
    """The MTU on the way, and what keeps containers apart."""
    told = (name for sign, name in _TUNNELS.items() if host.device.startswith(sign))
    kind = "WireGuard" if host.device_kind == "wireguard" else next(told, None)
    mtu = min((each for each in (host.mtu, around.passed_mtu) if each is not None), default=None)
    way = f"{host.device}{f' ({kind})' if kind else ''}" if host.device else "the way to it"
    if mtu is None:
        yield warning("mtu", "nobody could tell", f"{around.mtu} is reckoned with: set network.mtu if it is less")
    elif mtu < LEAST + VXLAN_HEADER:
        yield failed(
            "mtu", f"{mtu} bytes over {way}", f"users' networks need {LEAST + VXLAN_HEADER} at least: raise it there"
        )
    elif mtu < around.mtu:
        yield warning(
            "mtu",
            f"{mtu} bytes over {way}, and {around.mtu} is reckoned with",
            f"set mtu = {mtu} below [network], or large transfers between nodes hang",
        )
    else:
        yield ok("mtu", f"{mtu} bytes over {way}; users' networks get {around.mtu - VXLAN_HEADER * around.has_overlay}")
    if around.has_guard:
        yield _check_filter(host, around.guard)


def _check_filter(host: HostFacts, guard: tuple[str, str]) -> Finding:
    state, why = guard
    if state == "ok":
        return ok("filter", "in place")
    if state == "failed":
        return failed(
            "filter", f"not in place: {why}", "no container starts there until it is: `sudo make up` tries again"
        )
    if host.nf_tables:
        return ok("filter", "the kernel has nf_tables")
    return warning(
        "filter",
        "nobody could tell whether the kernel has nf_tables",
        "the packet filter needs it: kernel 4.14 or newer",
    )


def check_swarm(docker: DockerFacts, around: Around) -> Iterator[Finding]:
    """Users' networks over several nodes."""
    if not around.has_overlay:
        return
    if docker.swarm_state != "active":
        if around.is_new:
            yield ok("swarm", "joins when the node is added")
        else:
            yield failed("swarm", f"{docker.swarm_state}: no network of users reaches it", "`sudo make up` has it join")
    elif around.members is None:
        yield warning("swarm", "member of one; whether it is gpuhub's, the first node did not tell")
    elif docker.swarm_node in around.members:
        yield ok("swarm", "member of gpuhub's")
    else:
        yield failed(
            "swarm",
            "member of another Swarm",
            "`docker swarm leave` there first (with --force on a manager): a daemon is in one Swarm only",
        )


def check_login(host: HostFacts, *, needs_sudo: bool, is_tls: bool) -> Iterator[Finding]:
    """What the administrator may do over SSH."""
    if not is_tls:
        if host.socket == "usable":
            yield ok("rights", f"{host.user} may use Docker's socket")
        elif host.socket == "missing":
            yield failed("rights", "/var/run/docker.sock is not there", "install Docker Engine, and have it run")
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
