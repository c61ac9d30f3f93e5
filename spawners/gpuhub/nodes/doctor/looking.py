"""Asks nodes and their Docker daemons; what the answers mean is said in `checks`."""

from __future__ import annotations

import pwd
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress

from gpuhub import names
from gpuhub.containers import mtu
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.swarm import SWARM_PORT, manager
from gpuhub.errors import GpuhubError, NotFound
from gpuhub.guard.container import parse_line
from gpuhub.nodes.agent_container import IMAGE, read_last_line
from gpuhub.nodes.doctor.checks import Around
from gpuhub.nodes.doctor.facts import (
    DockerFacts,
    GpuFacts,
    HostFacts,
    build_probe_words,
    parse_probe,
    probe_script,
    read_agent_gpus,
    read_docker,
)
from gpuhub.nodes.head import head_address
from gpuhub.nodes.readings import parse_agent_line
from gpuhub.settings import Cluster
from gpuhub.storage.probe import Server, servers_of

#: Not the label of gpuhub's own containers: this one is of no lease and of no kind that the broker keeps.
LABEL_DOCTOR = "gpuhub.doctor"
#: `probe.sh` tries each place for three seconds at most.
_PROBE_S = 60
_CONNECT_S = 1.0
_PING_S = 2
#: Of an ICMP packet over IPv4, bytes: what of the MTU is not its content.
_PING_HEADERS = 28
_LARGEST = 9216
#: Run in the image, as the container's root: everything else is the node's own, found through its first process. A bind
#: of "/" is refused by Docker where nobody has made that a shared mount.
_ENTER = 'import os, sys; os.chroot("/proc/1/root"); os.chdir("/"); os.execv("/bin/sh", ["sh", "-c", *sys.argv[1:]])'


async def look_at_docker(daemons: Daemons, node: str) -> DockerFacts:
    """What the daemon says of itself.

    Raises:
        NodeUnreachable: it does not answer.
    """
    version = await daemons.call(node, "version", api_version=False)
    before = time.time()
    info = await daemons.call(node, "info")
    return read_docker(info, version, before=before, after=time.time())


async def look_inside(daemons: Daemons, node: str, words: list[str]) -> HostFacts:
    """What the machine says of itself, asked in a short-lived container that sees its network, processes and files.

    Raises:
        ImageMissing: there is no image yet to run it in.
        GpuhubError: it could not be run, or broke off.
    """
    host = await daemons.call(
        node,
        "create_host_config",
        network_mode="host",
        pid_mode="host",
        cap_drop=["ALL"],
        cap_add=["SYS_CHROOT", "SYS_PTRACE", "DAC_READ_SEARCH"],
        # AppArmor and SELinux keep containers from looking at the machine's first process otherwise.
        security_opt=["no-new-privileges", "apparmor=unconfined", "label=disable"],
        read_only=True,
        mem_limit="256m",
        pids_limit=64,
    )
    await _remove_old(daemons, node)
    made = await daemons.call(
        node,
        "create_container",
        image=IMAGE,
        user="0:0",
        command=["python3", "-c", _ENTER, probe_script(), "probe", *words],
        labels={LABEL_DOCTOR: daemons.instance},
        host_config=host,
    )
    try:
        await daemons.call(node, "start", made["Id"])
        await daemons.run(node, lambda client: client.wait(made["Id"], timeout=_PROBE_S), long=True)
        text: bytes = await daemons.call(node, "logs", made["Id"], stdout=True, stderr=True)
    finally:
        with suppress(NotFound):
            await daemons.call(node, "remove_container", made["Id"], force=True, v=True)
    return parse_probe(text.decode("utf-8", "replace"))


async def _remove_old(daemons: Daemons, node: str) -> None:
    """What a doctor that was killed has left."""
    mine = {"label": [f"{LABEL_DOCTOR}={daemons.instance}"], "status": ["exited", "created"]}
    for found in await daemons.call(node, "containers", all=True, filters=mine):
        with suppress(NotFound):
            await daemons.call(node, "remove_container", found["Id"], force=True, v=True)


async def read_gpus(daemons: Daemons, node: str) -> tuple[GpuFacts, ...]:
    """What the GPU agent on a node last said; nothing where none runs there."""
    try:
        reading = parse_agent_line(await read_last_line(daemons, node, names.agent_container(daemons.instance)))
    except GpuhubError:
        return ()
    return () if reading is None else read_agent_gpus(reading.driver, [gpu for gpu in reading.gpus if gpu.uuid])


async def read_guard(daemons: Daemons, node: str) -> tuple[str, str]:
    """State and reason in what the node's guard last said; empty where none runs there."""
    try:
        return parse_line(await read_last_line(daemons, node, names.guard_container(daemons.instance)))
    except GpuhubError:
        return "", ""


async def read_members(daemons: Daemons, cluster: Cluster) -> frozenset[str] | None:
    """The ids of the Swarm's members; None where there is no Swarm of ours yet."""
    try:
        return frozenset(member["ID"] for member in await daemons.call(manager(cluster).name, "nodes"))
    except GpuhubError:
        return None


def words_for(around: Around, docker_root: str) -> list[str]:
    """What `probe.sh` is asked to look at."""
    others = [*around.nfs, *([] if around.manager is None else [around.manager])]
    places = [*((around.head, port) for port in around.head_ports.values()), *map(_split_place, others)]
    if not re.fullmatch(r"/[A-Za-z0-9/._-]*", docker_root):
        docker_root = "/var/lib/docker"
    return build_probe_words(
        docker_root=docker_root, head=around.head, places=places, accounts=around.accounts, slurm=around.slurm
    )


def _split_place(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    return host, int(port)


def nfs_servers(cluster: Cluster) -> list[Server]:
    """The file servers of the settings."""
    return servers_of((cluster.storage.home, cluster.storage.datasets), cluster.storage.nfs_options)


def look_around(cluster: Cluster, address: str, *, is_new: bool = False) -> Around:
    """What the head node knows that concerns a node at this address; blocks for some seconds at most."""
    head = head_address(cluster)
    ports = {"hub": cluster.hub.api_port, "broker": cluster.hub.broker_port}
    first = manager(cluster).address
    return Around(
        head=head,
        head_ports=ports,
        listening=frozenset(port for port in ports.values() if is_listening(head, port)),
        nfs=tuple(f"{server.host}:{server.port}" for server in nfs_servers(cluster)),
        accounts=find_accounts((*cluster.users.allowed, *cluster.users.admins)),
        mtu=mtu.find_mtu(cluster),
        passed_mtu=measure_mtu(address),
        manager=f"{first}:{SWARM_PORT}" if cluster.has_overlay and first != address else None,
        is_new=is_new,
        has_overlay=cluster.has_overlay,
        has_guard=cluster.network.guard,
    )


def find_accounts(users: Iterable[str]) -> dict[str, int]:
    """The numbers of those that have an account on this machine."""
    found = {}
    for user in users:
        with suppress(KeyError):
            found[user] = pwd.getpwnam(user).pw_uid
    return found


def is_listening(host: str, port: int) -> bool:
    """Whether a TCP connection can be made."""
    try:
        with socket.create_connection((host, port), _CONNECT_S):
            return True
    except OSError:
        return False


def measure_mtu(address: str) -> int | None:
    """The MTU of this machine's interface on the way, where a packet of that size comes back; None where none does.

    Packets that may not be cut into pieces are sent; firewalls may swallow them.
    """
    way = mtu.read_way(address)
    if way is None or way.mtu is None or way.interface == "lo" or ":" in address or shutil.which("ping") is None:
        return None
    size = min(way.mtu, _LARGEST) - _PING_HEADERS
    command = ["ping", "-n", "-c", "1", "-W", str(_PING_S), "-M", "do", "-s", str(size), address]
    done = subprocess.run(command, check=False, capture_output=True, timeout=_PING_S + 3)
    return size + _PING_HEADERS if done.returncode == 0 else None
