"""Nodes behind WireGuard, with its user-space program between namespaces, and a user's network over it."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from gpuhub.config import settings
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker import networks
from gpuhub.docker.client import DockerClients
from gpuhub.docker.networks import find_mtu
from gpuhub.docker.swarm import membership
from gpuhub.ops.doctor.nodes.node_queries import measure_mtu
from gpuhub.ops.provision import cluster_file
from gpuhub_closet.topology import build_subnet
from tests.support.closet.practice_closet import INSTANCE, Closet
from tests.support.closet.ssh_machines import wait

#: Larger than any buffer on the way, bytes.
SIZE = 32 * 1024**2
SUBNET = build_subnet(f"{INSTANCE}-wg")
PORT = 51820
SERVE = f"""
import socket
server = socket.create_server(("0.0.0.0", 7000))
print("ready", flush=True)
connection, _ = server.accept()
left = {SIZE}
while left and (part := connection.recv(1 << 20)):
    left -= len(part)
connection.sendall(b"all" if not left else b"short")
"""
SEND = f"""
import socket
mtus = [int(open(f"/sys/class/net/eth{{n}}/mtu").read()) for n in (0,)]
with socket.create_connection(("receiver", 7000), 20) as connection:
    connection.settimeout(60)
    connection.sendall(bytes({SIZE}))
    connection.shutdown(socket.SHUT_WR)
    print(*mtus, connection.recv(9).decode())
"""


class Peer:
    """A machine with a WireGuard interface: a closet node, or the head node when `netns` is empty."""

    def __init__(self, name: str, netns: str | None, outer: str, folder: Path) -> None:
        self.name, self.outer = name, outer
        self.interface = f"wg{name}"
        self.enter = [] if netns is None else ["nsenter", f"--net=/run/netns/{netns}"]
        key = self.run("wg", "genkey")
        self.key = folder / f"{name}.key"
        self.key.write_text(key)
        self.public = subprocess.run(
            ["wg", "pubkey"], input=key, check=True, capture_output=True, text=True
        ).stdout.strip()

    def run(self, *command: str) -> str:
        return subprocess.run([*self.enter, *command], check=True, capture_output=True, text=True).stdout


@contextmanager
def tunnel(peers: dict[str, Peer]) -> Iterator[None]:
    """Bring up every peer's interface under the addresses that are the dictionary's keys."""
    with ExitStack() as stack:
        for address, peer in peers.items():
            process = stack.enter_context(
                subprocess.Popen(
                    [*peer.enter, "wireguard-go", "-f", peer.interface],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
            stack.callback(process.terminate)
            socket = Path(f"/var/run/wireguard/{peer.interface}.sock")
            wait(lambda socket=socket: socket.exists(), "wireguard-go: is /dev/net/tun there?")
            others = [
                word
                for there, other in peers.items()
                if other is not peer
                for word in ("peer", other.public, "allowed-ips", f"{there}/32", "endpoint", f"{other.outer}:{PORT}")
            ]
            peer.run("wg", "set", peer.interface, "listen-port", str(PORT), "private-key", str(peer.key), *others)
            peer.run("ip", "address", "add", f"{address}/{SUBNET.prefixlen}", "dev", peer.interface)
            peer.run("ip", "link", "set", peer.interface, "up")
        yield


@pytest.fixture
def cluster(closet: Closet, tmp_path: Path) -> Iterator[ClusterSettings]:
    """Settings with rig1 and rig2 under addresses that only WireGuard reaches."""
    nodes = [closet.plan.node(name) for name in ("rig1", "rig2")]
    peers = {
        str(SUBNET.network_address + number): Peer(name, netns, str(outer), tmp_path)
        for number, (name, netns, outer) in enumerate(
            [
                ("head", None, closet.plan.head),
                *((node.name, closet.plan.netns_name(node), node.address) for node in nodes),
            ],
            1,
        )
    }
    lines = [line for line in closet.cluster_file.read_text().splitlines() if not line.startswith("gpus = ")]
    text = cluster_file.remove_node("\n".join(lines) + "\n", "rig3")
    for address, peer in peers.items():
        text = text.replace(f'"{peer.outer}"', f'"{address}"')
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    leave_swarm(closet)
    with tunnel(peers):
        yield settings.load(file)
        leave_swarm(closet)


def leave_swarm(closet: Closet) -> None:
    """Let every node leave whatever Swarm it is in: one that were left behind alone would have no leader."""
    for node in closet.plan.nodes:
        with closing(closet.client(node)) as client:
            if client.info()["Swarm"]["LocalNodeState"] != "inactive":
                client.api.leave_swarm(force=True)


def test_a_large_transfer_over_a_users_network(closet: Closet, cluster: ClusterSettings, tiny_image: str):
    """A large transfer arrives complete over packets of 1420 bytes in WireGuard and 1370 in VXLAN."""
    assert find_mtu(cluster) == 1420
    assert [measure_mtu(node.address) for node in cluster.nodes] == [1420, 1420]
    daemons = DockerClients(cluster.nodes, instance=INSTANCE, run_dir=closet.paths.run)

    async def join() -> networks.UserNetwork:
        await membership.ensure_swarm(daemons, cluster)
        return await networks.ensure_user_network(daemons, cluster, INSTANCE, "ada")

    try:
        network = asyncio.run(join())
    finally:
        daemons.close()
    with closing(closet.client("rig1")) as there, closing(closet.client("rig2")) as sender:
        receiver = there.containers.run(
            tiny_image, ["python3", "-c", SERVE], name="receiver", network=network.name, detach=True
        )
        try:
            wait(lambda: b"ready" in receiver.logs(), "the receiver")
            output = sender.containers.run(tiny_image, ["python3", "-c", SEND], network=network.name, remove=True)
            assert output.decode().split() == ["1370", "all"]
        finally:
            receiver.remove(force=True)
            there.networks.get(network.name).remove()
