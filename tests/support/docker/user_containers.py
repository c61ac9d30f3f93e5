"""The participants of the firewall's tests: containers of two users, listeners, and hosts outside the closet."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from gpuhub.common import names
from gpuhub.common.names import NOTEBOOK_PORT
from gpuhub.config.settings import ClusterSettings
from gpuhub.config.users.identity import UserIdentity
from gpuhub.docker import networks
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers import container_lifecycle
from gpuhub.docker.containers.container_spec import ContainerContext, ContainerSpec, build_worker_spec
from gpuhub.docker.containers.security import WorkerSize
from gpuhub.docker.data_network import join_data_network
from gpuhub_closet import shell
from gpuhub_closet.topology import ClosetPlan
from tests.support.closet.practice_closet import INSTANCE, Closet

#: A namespace on the closet's switch for everything beyond it: another machine of the LAN, and the internet.
OUTSIDE = f"{INSTANCE}-out"
METADATA, INTERNET, PRIVATE = "169.254.169.254", "198.51.100.7", "192.168.77.7"
#: Ports in users' containers: the notebook's stands for any service, the others for rendezvous and engines.
SERVED = (NOTEBOOK_PORT, 29500, 5555)
#: Ports on nodes: SSH, rpcbind, NFS, Docker.
ON_NODES = (22, 111, 2049, 2375, 2376)

LISTEN = """
import select, socket, sys
open_ = []
for one in sys.argv[1:]:
    host, _, port = one.rpartition(":")
    listener = socket.create_server((host, int(port)))
    open_.append(listener)
print("listening", flush=True)
while True:
    for ready in select.select(open_, [], [])[0]:
        ready.accept()[0].close()
"""
#: Prints as JSON the result of a connection to each address: open, refused, or silent.
PROBE = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def probe(target):
    host, port, device = target
    with socket.socket() as connection:
        connection.settimeout(5)
        if device:
            connection.setsockopt(socket.SOL_SOCKET, 25, device.encode())
        try:
            connection.connect((host, port))
        except TimeoutError:
            return "silent"
        except OSError:
            return "refused"
        return "open"
targets = json.loads(sys.argv[1])
with ThreadPoolExecutor(len(targets)) as pool:
    print(json.dumps(dict(zip(targets, pool.map(probe, targets.values())))))
"""
#: Host, port, and the outgoing interface when it is not the default.
Target = tuple[str, int, str]


@dataclasses.dataclass(frozen=True)
class UserContainer:
    """A user's running container."""

    node: str
    id: str
    #: Addresses on the node's bridge and on the user's network.
    access: str
    own: str
    #: On the node's own network card; empty for none.
    data: str = ""

    def interfaces(self, closet: Closet) -> set[str]:
        """Return the names of its network interfaces."""
        with closing(closet.client(self.node)) as client:
            listed = client.containers.get(self.id).exec_run(["ls", "/sys/class/net"])
        return set(listed.output.decode().split())

    def probe(self, closet: Closet, targets: Mapping[str, Target]) -> dict[str, str]:
        """Return the results of connections from the container."""
        with closing(closet.client(self.node)) as client:
            done = client.containers.get(self.id).exec_run(["python3", "-c", PROBE, json.dumps(targets)])
        assert done.exit_code == 0, done.output
        return dict(json.loads(done.output))


def probe_from(namespace: str | None, targets: Mapping[str, Target]) -> dict[str, str]:
    """Return the results of connections from the head node, or from a namespace of this machine."""
    command = [*_within(namespace), sys.executable, "-c", PROBE, json.dumps(targets)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout))


def build_context(cluster: ClusterSettings, node: str, head: str) -> ContainerContext:
    """Build the context of a container without a GPU."""
    return ContainerContext(
        instance=INSTANCE, cluster=cluster, node=cluster.node(node), gpu_uuids=(), subnet="", head_address=head
    )


def build_identity(name: str, uid: int) -> UserIdentity:
    """Return a user without an account on this machine."""
    return UserIdentity(name=name, uid=uid, gid=uid, group_names=(name,))


async def start_containers(
    daemons: DockerClients,
    cluster: ClusterSettings,
    identity: UserIdentity,
    nodes: Sequence[str],
    *,
    image: str,
    head: str,
) -> list[UserContainer]:
    """Start a container on each node concurrently."""
    specs = [
        build_listener(cluster, identity, node, image=image, head=head, index=index) for index, node in enumerate(nodes)
    ]
    await asyncio.gather(*(networks.ensure_access_network(daemons, cluster, INSTANCE, node) for node in set(nodes)))
    return await asyncio.gather(
        *(start_container(daemons, cluster, identity, node, spec) for node, spec in zip(nodes, specs, strict=True))
    )


def build_listener(
    cluster: ClusterSettings, identity: UserIdentity, node: str, *, image: str, head: str, index: int
) -> ContainerSpec:
    """Build a worker's container that listens on all addresses and publishes a notebook's port, without files."""
    spec = build_worker_spec(
        context=build_context(cluster, node, head),
        identity=identity,
        image=image,
        lease_id=f"lease-{identity.name}",
        epoch=1,
        job_id=f"job-{identity.name}",
        run_id="run-123456",
        index=index,
        run_index=index,
        size=WorkerSize(),
    )
    return dataclasses.replace(
        spec,
        command=("python3", "-c", LISTEN, *(f"0.0.0.0:{port}" for port in SERVED)),
        working_dir="/",
        ports=(NOTEBOOK_PORT,),
        host_config={
            **spec.host_config,
            "mounts": [],
            "port_bindings": {NOTEBOOK_PORT: (cluster.node(node).address,)},
        },
    )


async def start_container(
    daemons: DockerClients, cluster: ClusterSettings, identity: UserIdentity, node: str, spec: ContainerSpec
) -> UserContainer:
    """Start a container on the access bridge and then on the user's network, as the product does."""
    network = await networks.ensure_user_network(daemons, cluster, INSTANCE, identity.name)
    created = await container_lifecycle.ensure_created(daemons, node, spec, adopt=False)
    await daemons.call(node, "start", created.id)
    await networks.connect_container(daemons, node, created.id, network)
    data = names.data_network_name(INSTANCE)
    if cluster.has_data_network:
        await join_data_network(daemons, cluster, node, created.id, network)
    inspected = await daemons.call(node, "inspect_container", created.id)
    joined = inspected["NetworkSettings"]["Networks"]
    assert set(joined) - {data} == {spec.host_config["network_mode"], network.name}
    return UserContainer(
        node=node,
        id=created.id,
        access=joined[spec.host_config["network_mode"]]["IPAddress"],
        own=joined[network.name]["IPAddress"],
        data=joined[data]["IPAddress"] if data in joined else "",
    )


def find_published_port(closet: Closet, inside: UserContainer) -> int:
    """Return the node's port that is forwarded to a container's notebook."""
    with closing(closet.client(inside.node)) as client:
        return int(client.api.port(inside.id, NOTEBOOK_PORT)[0]["HostPort"])


@contextmanager
def listening(namespace: str | None, addresses: Sequence[str]) -> Iterator[None]:
    """Listen on `host:port` addresses of this machine, or of a namespace of it."""
    command = [*_within(namespace), sys.executable, "-c", LISTEN, *addresses]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
            yield
        finally:
            process.kill()


@contextmanager
def outside_hosts(plan: ClosetPlan) -> Iterator[str]:
    """Add the hosts beyond the closet, reached by the nodes' default route; yield their address on the LAN."""
    address = str(plan.subnet.network_address + 99)
    shell.run_command(("ip", "netns", "add", OUTSIDE))
    try:
        shell.run_command(("ip", "link", "add", OUTSIDE, "type", "veth", "peer", "name", "eth0", "netns", OUTSIDE))
        shell.run_command(("ip", "link", "set", OUTSIDE, "master", plan.bridge, "up"))
        inside = ("ip", "-netns", OUTSIDE)
        shell.run_command((*inside, "link", "set", "lo", "up"))
        shell.run_command((*inside, "address", "add", f"{address}/{plan.subnet.prefixlen}", "dev", "eth0"))
        shell.run_command((*inside, "link", "set", "eth0", "up"))
        for other in (METADATA, INTERNET, PRIVATE):
            shell.run_command((*inside, "address", "add", f"{other}/32", "dev", "lo"))
        for node in plan.nodes:
            shell.run_command(("ip", "-netns", plan.netns_name(node), "route", "replace", "default", "via", address))
        with ExitStack() as stack:
            stack.enter_context(listening(OUTSIDE, [f"{other}:80" for other in (METADATA, INTERNET, PRIVATE)]))
            yield address
    finally:
        for node in plan.nodes:
            shell.is_successful(("ip", "-netns", plan.netns_name(node), "route", "delete", "default"))
        shell.is_successful(("ip", "link", "delete", OUTSIDE))
        shell.is_successful(("ip", "netns", "delete", OUTSIDE))


def run_nft(namespace: str, *arguments: str) -> str:
    """Run nft in a node's namespace and return its output."""
    return shell.run_command((*_within(namespace), "nft", *arguments))


def has_table(namespace: str, table: str, family: str = "inet") -> bool:
    """Return whether a node has an nftables table."""
    return shell.is_successful((*_within(namespace), "nft", "list", "table", family, table))


def _within(namespace: str | None) -> tuple[str, ...]:
    return () if namespace is None else ("nsenter", f"--net={Path('/run/netns') / namespace}")
