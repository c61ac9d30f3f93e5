"""What the tests of the packet filter put on the closet: containers of two users, listeners, and the world outside."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from gpuhub.closet import shell
from gpuhub.closet.plan import Plan
from gpuhub.containers import creation, networks
from gpuhub.containers.arguments import NOTEBOOK_PORT, ContainerSpec, Place, build_worker
from gpuhub.containers.daemons import Daemons
from gpuhub.identity import Identity
from gpuhub.settings import Cluster
from tests.integration.conftest import INSTANCE, Closet

#: A namespace on the closet's switch that plays everything beyond it: another machine of the LAN, and the way out.
OUTSIDE = f"{INSTANCE}-out"
METADATA, INTERNET, PRIVATE = "169.254.169.254", "198.51.100.7", "192.168.77.7"
#: What runs in users' containers: SSH's port stands for any service, the others for rendezvous and engines.
SERVED = (NOTEBOOK_PORT, 29500, 5555)
#: What runs on nodes: SSH, rpcbind, NFS, Docker.
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
#: Prints as JSON what becomes of a connection to each address: open, refused, or silent.
PROBE = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def probe(target):
    host, port, device = target
    with socket.socket() as connection:
        connection.settimeout(2)
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
#: Host, port, and the interface to go out by where it is not the usual one.
Target = tuple[str, int, str]


@dataclasses.dataclass(frozen=True)
class Inside:
    """A user's running container."""

    node: str
    id: str
    #: On the node's bridge, and on the user's network.
    access: str
    own: str

    def interfaces(self, closet: Closet) -> set[str]:
        """Names of its network interfaces."""
        with closing(closet.client(self.node)) as client:
            listed = client.containers.get(self.id).exec_run(["ls", "/sys/class/net"])
        return set(listed.output.decode().split())

    def probe(self, closet: Closet, targets: Mapping[str, Target]) -> dict[str, str]:
        """What becomes of connections from here."""
        with closing(closet.client(self.node)) as client:
            done = client.containers.get(self.id).exec_run(["python3", "-c", PROBE, json.dumps(targets)])
        assert done.exit_code == 0, done.output
        return dict(json.loads(done.output))


def probe_from(namespace: str | None, targets: Mapping[str, Target]) -> dict[str, str]:
    """What becomes of connections from the head node itself, or from a namespace of this machine."""
    command = [*_within(namespace), sys.executable, "-c", PROBE, json.dumps(targets)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout))


def place(cluster: Cluster, node: str, head: str) -> Place:
    """Without a GPU."""
    return Place(
        instance=INSTANCE, cluster=cluster, node=cluster.node(node), gpu_uuids=(), subnet="", head_address=head
    )


def person(name: str, uid: int) -> Identity:
    """A user without an account on this machine."""
    return Identity(name=name, uid=uid, gid=uid, group_names=(name,))


async def run_for(
    daemons: Daemons, cluster: Cluster, identity: Identity, nodes: Sequence[str], *, image: str, head: str
) -> list[Inside]:
    """A container on each node, side by side."""
    specs = [build(cluster, identity, node, image=image, head=head, index=index) for index, node in enumerate(nodes)]
    await asyncio.gather(*(networks.ensure_access_network(daemons, cluster, INSTANCE, node) for node in set(nodes)))
    return await asyncio.gather(
        *(start(daemons, cluster, identity, node, spec) for node, spec in zip(nodes, specs, strict=True))
    )


def build(cluster: Cluster, identity: Identity, node: str, *, image: str, head: str, index: int) -> ContainerSpec:
    """A worker's container as the product makes it, that listens on all its addresses and publishes a notebook's port;
    it has no files.
    """
    spec = build_worker(
        place=place(cluster, node, head),
        identity=identity,
        image=image,
        lease_id=f"lease-{identity.name}",
        epoch=1,
        job_id=f"job-{identity.name}",
        run_id="run-123456",
        index=index,
        number=index,
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


async def start(daemons: Daemons, cluster: Cluster, identity: Identity, node: str, spec: ContainerSpec) -> Inside:
    """As the product does: on the access bridge, then on the user's network."""
    network = await networks.ensure_user_network(daemons, cluster, INSTANCE, identity.name)
    made = await creation.ensure_created(daemons, node, spec, adopt=False)
    await daemons.call(node, "start", made.id)
    await networks.connect(daemons, node, made.id, network)
    found = await daemons.call(node, "inspect_container", made.id)
    joined = found["NetworkSettings"]["Networks"]
    assert set(joined) == {spec.host_config["network_mode"], network.name}
    return Inside(
        node=node,
        id=made.id,
        access=joined[spec.host_config["network_mode"]]["IPAddress"],
        own=joined[network.name]["IPAddress"],
    )


def published(closet: Closet, inside: Inside) -> int:
    """The node's port that leads to a container's notebook."""
    with closing(closet.client(inside.node)) as client:
        return int(client.api.port(inside.id, NOTEBOOK_PORT)[0]["HostPort"])


@contextmanager
def listening(namespace: str | None, addresses: Sequence[str]) -> Iterator[None]:
    """Something answers there (`host:port`) on this machine, or in a namespace of it."""
    command = [*_within(namespace), sys.executable, "-c", LISTEN, *addresses]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
            yield
        finally:
            process.kill()


@contextmanager
def outside(plan: Plan) -> Iterator[str]:
    """The world beyond the closet, reached by the nodes' default route; its address on the LAN."""
    address = str(plan.subnet.network_address + 99)
    shell.run(("ip", "netns", "add", OUTSIDE))
    try:
        shell.run(("ip", "link", "add", OUTSIDE, "type", "veth", "peer", "name", "eth0", "netns", OUTSIDE))
        shell.run(("ip", "link", "set", OUTSIDE, "master", plan.bridge, "up"))
        inside = ("ip", "-netns", OUTSIDE)
        shell.run((*inside, "link", "set", "lo", "up"))
        shell.run((*inside, "address", "add", f"{address}/{plan.subnet.prefixlen}", "dev", "eth0"))
        shell.run((*inside, "link", "set", "eth0", "up"))
        for other in (METADATA, INTERNET, PRIVATE):
            shell.run((*inside, "address", "add", f"{other}/32", "dev", "lo"))
        for node in plan.nodes:
            shell.run(("ip", "-netns", plan.netns(node), "route", "replace", "default", "via", address))
        with ExitStack() as stack:
            stack.enter_context(listening(OUTSIDE, [f"{other}:80" for other in (METADATA, INTERNET, PRIVATE)]))
            yield address
    finally:
        for node in plan.nodes:
            shell.succeeds(("ip", "-netns", plan.netns(node), "route", "delete", "default"))
        shell.succeeds(("ip", "link", "delete", OUTSIDE))
        shell.succeeds(("ip", "netns", "delete", OUTSIDE))


def nft(namespace: str, *arguments: str) -> str:
    """What nft says in a node's namespace."""
    return shell.run((*_within(namespace), "nft", *arguments))


def has_table(namespace: str, table: str) -> bool:
    """Whether a node has a table."""
    return shell.succeeds((*_within(namespace), "nft", "list", "table", "inet", table))


def _within(namespace: str | None) -> tuple[str, ...]:
    return () if namespace is None else ("nsenter", f"--net={Path('/run/netns') / namespace}")
