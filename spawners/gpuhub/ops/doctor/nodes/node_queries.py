"""Queries of nodes and their Docker daemons."""

from __future__ import annotations

import asyncio
import inspect
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import date

from gpuhub.common import names
from gpuhub.common.errors import GpuhubError, ImageMissing, NotFound
from gpuhub.common.paths import Paths
from gpuhub.config.head_address import find_head_address
from gpuhub.config.machines.storage import parse_nfs_options
from gpuhub.config.settings import ClusterSettings
from gpuhub.config.users.identity import find_known_uids
from gpuhub.docker import networks
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.container_spec import BASE_IMAGE
from gpuhub.docker.containers.firewall_container import parse_status_line
from gpuhub.docker.containers.probe_container import run_probe
from gpuhub.docker.swarm.managers import ask_manager
from gpuhub.nodes.agent import PERIOD_S
from gpuhub.nodes.agent_container import parse_agent_line, read_last_line
from gpuhub.nodes.status import STALE_S, AgentReading
from gpuhub.ops.doctor.node_facts import (
    DockerFacts,
    GpuFacts,
    GpuReport,
    HostFacts,
    build_docker_facts,
    build_gpu_report,
    build_script_arguments,
    parse_probe,
    read_probe_script,
)
from gpuhub.ops.doctor.nodes import link_modes
from gpuhub.ops.doctor.nodes.node_checks import NodeEnvironment
from gpuhub.ops.doctor.room.room_temperature import WINDOW_S, WINDOWS, PastReading, parse_agent_log
from gpuhub.storage.probe import NfsServer, find_servers

_CONNECT_S = 1.0
_AGENT_POLL_S = 0.5
#: Lines of a GPU agent, one every two seconds; some more than are needed.
_HISTORY_LINES = round(WINDOWS * WINDOW_S / PERIOD_S * 1.1)
_PING_S = 2
#: Headers of an ICMP packet over IPv4, bytes.
_PING_HEADERS = 28
_MAX_PROBED_MTU = 9216
#: Runs in the image as root, and changes to the node's root directory through its first process. Docker refuses a bind
#: of "/" where that is not a shared mount.
_ENTER = 'import os, sys; os.chroot("/proc/1/root"); os.chdir("/"); os.execv("/bin/sh", ["sh", "-c", *sys.argv[1:]])'


async def read_docker_facts(daemons: DockerClients, node: str) -> DockerFacts:
    """Read the facts of a node's Docker daemon.

    Raises:
        NodeUnreachable: It does not answer.
    """
    version = await daemons.call(node, "version", api_version=False)
    before = time.time()
    info = await daemons.call(node, "info")
    return build_docker_facts(info, version, before=before, after=time.time())


async def probe_node(daemons: DockerClients, node: str, arguments: list[str]) -> HostFacts:
    """Read the facts of a machine in a short-lived container that sees its network, processes and files.

    Raises:
        ImageMissing: The node does not have the image yet.
        GpuhubError: The container could not run, or ended early.
    """
    host = {
        "network_mode": "host",
        "pid_mode": "host",
        "cap_drop": ["ALL"],
        "cap_add": ["SYS_CHROOT", "SYS_PTRACE", "DAC_READ_SEARCH"],
        # Otherwise AppArmor and SELinux forbid access to the machine's first process.
        "security_opt": ["no-new-privileges", "apparmor=unconfined", "label=disable"],
        "read_only": True,
        "mem_limit": "256m",
        "pids_limit": 64,
    }
    # Before the change of root, because a node may have no Python.
    start = f"{inspect.getsource(link_modes)}\n{_ENTER}"
    command = ["python3", "-c", start, read_probe_script(), "probe", *arguments]
    return parse_probe(await run_probe(daemons, node, command, host))


async def read_image_dates(daemons: DockerClients, cluster: ClusterSettings, node: str) -> dict[str, date | None]:
    """Return the date of the Debian packages in each image that the settings name, where the node has the image.

    Images that are based on gpuhub's have its label. None where an image has none, or another text in it.
    """
    dates: dict[str, date | None] = {}
    for name in sorted({BASE_IMAGE, *(image for profile in cluster.profiles for image in profile.offered_images)}):
        with suppress(NotFound, ImageMissing):
            description = await daemons.call(node, "inspect_image", name)
            dates[name] = None
            with suppress(ValueError):
                dates[name] = date.fromisoformat(
                    (description["Config"].get("Labels") or {}).get(names.LABEL_DEBIAN, "")
                )
    return dates


async def read_gpus(daemons: DockerClients, node: str) -> tuple[GpuFacts, ...]:
    """Return the GPUs in the last line of the node's GPU agent; none where there is none."""
    try:
        reading = await _read_agent(daemons, node)
    except GpuhubError:
        return ()
    return () if reading is None else build_gpu_report(reading).gpus


async def read_gpu_report(daemons: DockerClients, node: str, *, stale_s: float = STALE_S) -> GpuReport:
    """Return the report of the node's GPU agent, once it has written another line than the one that is there now."""
    container = names.agent_container_name(daemons.instance)
    advice = f"see `docker logs {container}` there and broker.log here, then `sudo make up`"
    end = time.monotonic() + stale_s
    first: AgentReading | None = None
    try:
        while time.monotonic() < end:
            reading = await _read_agent(daemons, node)
            if reading is not None and first is not None and reading.line_number != first.line_number:
                return build_gpu_report(reading)
            first = first or reading
            await asyncio.sleep(_AGENT_POLL_S)
    except NotFound:
        return GpuReport(error="no GPU agent runs there", advice=advice, has_agent=False)
    except GpuhubError as error:
        return GpuReport(error=f"its GPU agent cannot be read: {error}", advice=advice)
    return GpuReport(error=f"its GPU agent has written nothing for {stale_s:.0f} s", advice=advice)


async def read_agent_history(daemons: DockerClients, node: str) -> list[PastReading]:
    """Return what the node's GPU agent reported recently; nothing where there is no agent or no answer."""
    try:
        log: bytes = await daemons.call(
            node,
            "logs",
            names.agent_container_name(daemons.instance),
            stdout=True,
            stderr=False,
            timestamps=True,
            tail=_HISTORY_LINES,
        )
    except GpuhubError:
        return []
    return parse_agent_log(log)


async def _read_agent(daemons: DockerClients, node: str) -> AgentReading | None:
    return parse_agent_line(await read_last_line(daemons, node, names.agent_container_name(daemons.instance)))


async def read_daemon_ids(daemons: DockerClients, nodes: Sequence[str]) -> dict[str, str]:
    """Return the ids of the Docker daemons of the nodes that answer."""
    answers = await asyncio.gather(*(daemons.call(node, "info") for node in nodes), return_exceptions=True)
    return {
        node: str(answer["ID"])
        for node, answer in zip(nodes, answers, strict=True)
        if not isinstance(answer, BaseException)
    }


async def read_firewall_status(daemons: DockerClients, node: str) -> tuple[str, str]:
    """Return state and reason in the last status of the node's firewall container; empty where none runs."""
    try:
        return parse_status_line(await read_last_line(daemons, node, names.firewall_container_name(daemons.instance)))
    except GpuhubError:
        return "", ""


async def read_swarm_members(daemons: DockerClients, cluster: ClusterSettings) -> dict[str, str] | None:
    """Return the ids of the Swarm's members, each with `host:port` as a manager that can be reached, else empty.

    None where gpuhub has no Swarm yet, or none of its managers answers.
    """
    try:
        members = await ask_manager(daemons, cluster, lambda manager: daemons.call(manager, "nodes"))
    except GpuhubError:
        return None
    managers = {member["ID"]: member.get("ManagerStatus") or {} for member in members}
    return {
        member: str(status["Addr"]) if status.get("Reachability") == "reachable" else ""
        for member, status in managers.items()
    }


def build_probe_arguments(environment: NodeEnvironment, docker_root: str) -> list[str]:
    """Return the arguments of `probe.sh`."""
    others = [*environment.nfs_servers, *environment.swarm_managers]
    addresses = [*((environment.head, port) for port in environment.head_ports.values()), *map(_split_address, others)]
    if not re.fullmatch(r"/[A-Za-z0-9/._-]*", docker_root):
        docker_root = "/var/lib/docker"
    return build_script_arguments(
        docker_root=docker_root,
        head=environment.head,
        addresses=addresses,
        accounts=environment.accounts,
        own_address=environment.address,
        data_address=environment.data_address,
        folders=(docker_root, *environment.folders.values()),
        slurm=environment.slurm_paths,
    )


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def find_nfs_servers(cluster: ClusterSettings) -> list[NfsServer]:
    """Return the file servers of the settings."""
    return find_servers((cluster.storage.home, *cluster.storage.list_read_only()), cluster.storage.nfs_options)


def read_environment(cluster: ClusterSettings, paths: Paths, address: str, *, is_new: bool = False) -> NodeEnvironment:
    """Read what the head node knows about a node at this address; blocks for some seconds at most."""
    head = find_head_address(cluster)
    ports = {"hub": cluster.hub.api_port, "broker": cluster.hub.broker_port}
    return NodeEnvironment(
        address=address,
        head=head,
        head_ports=ports,
        listening_ports=frozenset(port for port in ports.values() if is_listening(head, port)),
        # The head node lets a machine reach its file server only when it is a node.
        nfs_servers=()
        if is_new and cluster.storage.serve
        else tuple(f"{server.host}:{server.port}" for server in find_nfs_servers(cluster)),
        uses_fsc="fsc" in parse_nfs_options(cluster.storage.nfs_options),
        accounts=find_known_uids(cluster.users, paths.state),
        mtu=networks.find_mtu(cluster),
        measured_mtu=measure_mtu(address),
        can_measure_mtu=shutil.which("ping") is not None,
        wanted_managers=len(cluster.swarm_managers),
        is_new=is_new,
        folders={
            **({} if cluster.storage.home.startswith("nfs://") else {"homes": find_homes_folder(cluster.storage.home)}),
            "gpuhub's own data": str(paths.state),
        },
        has_scratch=cluster.storage.scratch,
        has_overlay=cluster.has_overlay,
        is_encrypted=cluster.has_encrypted_overlay,
        has_firewall=cluster.network.guard,
    )


def find_homes_folder(home: str) -> str:
    """Return the folder of all homes: `/home` for `/home/{username}`."""
    return home.partition("{username}")[0].rpartition("/")[0] or "/"


def is_listening(host: str, port: int) -> bool:
    """Return whether a TCP connection can be opened."""
    try:
        with socket.create_connection((host, port), _CONNECT_S):
            return True
    except OSError:
        return False


def measure_mtu(address: str) -> int | None:
    """Return the MTU of this machine's route if a packet of that size is answered, else None.

    The packets may not be fragmented; firewalls may drop them.
    """
    route = networks.read_route(address)
    if route is None or route.mtu is None or route.interface == "lo" or ":" in address or shutil.which("ping") is None:
        return None
    size = min(route.mtu, _MAX_PROBED_MTU) - _PING_HEADERS
    command = ["ping", "-n", "-c", "1", "-W", str(_PING_S), "-M", "do", "-s", str(size), address]
    done = subprocess.run(command, check=False, capture_output=True, timeout=_PING_S + 3)
    return size + _PING_HEADERS if done.returncode == 0 else None
