"""A user's overlay and the data network against the nodes' own network: what VXLAN and macvlan cost ranks that exchange
data over TCP.

Two nodes are network namespaces with a link between them, first of 2.5 Gbit/s, then without a limit, so that the
processors are the limit. On each, a container's namespace is connected to a bridge with a VXLAN device, as Docker's
overlay driver sets them up (no learning, the peer's address given, port 4789, MTU 50 bytes below the link's), and has a
macvlan on the link, as on the data network. Docker itself and the firewall of gpuhub take no part.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

from tests.bench.product import paired_ratio, print_progress
from tests.support.network_namespaces import Machines, machines

PAIRS = 5
_RATE = "2500mbit"
_BYTES = 256 * 1024**2
_PORT = 5201
_VXLAN_HEADER = 50
_NODES = Machines("ghnet", "10.89.0")
_CONTAINERS = Machines("ghnetc", "10.89.1")
#: The same containers by their addresses on the nodes' interfaces.
_DATA = Machines("ghnetc", "10.89.2")

_RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
connection, _ = server.accept()
received, buffer = 0, bytearray(1 << 20)
while count := connection.recv_into(buffer):
    received += count
print(received, flush=True)
"""
_SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
block = bytes(1 << 20)
for _ in range(int(sys.argv[3]) // len(block)):
    connection.sendall(block)
"""


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield the figures of the group `network`."""
    host, overlay, data = measure_triples(_RATE)
    yield "network.overlay_mb_s", sorted(overlay)[PAIRS // 2], "MB/s"
    yield "network.overlay_over_host", paired_ratio(overlay, host), "ratio"
    yield "network.data_over_host", paired_ratio(data, host), "ratio"
    _, overlay, data = measure_triples(None)
    yield "network.data_over_overlay_unlimited", paired_ratio(data, overlay), "ratio"


def measure_triples(rate: str | None) -> tuple[list[float], list[float], list[float]]:
    """Return the throughput between the nodes, and between containers over the overlay and the data network, MB/s."""
    host, overlay, data = [], [], []
    with machines(_NODES.name, _NODES.prefix, 2, rate):
        try:
            for number in range(2):
                add_container(number)
            for pair in range(PAIRS):
                host.append(measure_throughput(_NODES))
                overlay.append(measure_throughput(_CONTAINERS))
                data.append(measure_throughput(_DATA))
                figures = f"{host[-1]:.3g}, over the overlay {overlay[-1]:.3g} and the data network {data[-1]:.3g} MB/s"
                print_progress(f"pair {pair + 1}: {figures}")
        finally:
            for number in range(2):
                _run(("ip", "netns", "del", _CONTAINERS.namespace(number)), check=False)
    return host, overlay, data


def add_container(number: int) -> None:
    """Make a container's namespace on a node, and connect it to the overlay."""
    node, container = _NODES.namespace(number), _CONTAINERS.namespace(number)
    _run(("ip", "netns", "del", container), check=False)
    _run(("ip", "netns", "add", container))
    peer = _NODES.address(1 - number)
    vxlan = ("type", "vxlan", "id", "4097", "dstport", "4789", "nolearning", "remote", peer, "dev", "eth0")
    for words in (
        ("add", "br0", "type", "bridge"),
        ("add", "vxlan0", *vxlan),
        ("add", "veth0", "type", "veth", "peer", "name", "eth0", "netns", container),
        ("set", "vxlan0", "master", "br0", "up"),
        ("set", "veth0", "master", "br0", "up"),
        ("set", "br0", "up"),
    ):
        _run(("ip", "-netns", node, "link", *words))
    _run(("ip", "-netns", container, "addr", "add", f"{_CONTAINERS.address(number)}/24", "dev", "eth0"))
    _run(("ip", "-netns", container, "link", "set", "eth0", "mtu", str(1500 - _VXLAN_HEADER), "up"))
    macvlan = ("name", "data0", "type", "macvlan", "mode", "private")
    _run(("ip", "-netns", node, "link", "add", "link", "eth0", *macvlan))
    _run(("ip", "-netns", node, "link", "set", "data0", "netns", container))
    _run(("ip", "-netns", container, "addr", "add", f"{_DATA.address(number)}/24", "dev", "data0"))
    _run(("ip", "-netns", container, "link", "set", "data0", "up"))


def measure_throughput(ends: Machines) -> float:
    """Return the throughput of one TCP connection from the first to the second end, MB/s."""
    address = (ends.address(1), str(_PORT))
    receiver = subprocess.Popen(
        ends.enter(1, sys.executable, "-c", _RECEIVE, *address), stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    with closing(receiver.stdout) as answers:
        try:
            assert answers.readline() == "ready\n"
            began = time.monotonic()
            _run(ends.enter(0, sys.executable, "-c", _SEND, *address, str(_BYTES)))
            received = int(answers.readline())
            elapsed = time.monotonic() - began
            assert received == _BYTES
        finally:
            receiver.kill()
            receiver.wait(10)
    return received / elapsed / 1e6


def _run(command: Sequence[str], *, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True, timeout=120)
