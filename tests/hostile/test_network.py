"""What a container reaches: hub and broker, and nothing else of the cluster."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gpuhub.common import names
from gpuhub_closet.topology import ClosetNode
from tests.hostile.scene import Scene

_DNS = 53
_USUAL_PORTS = {22, 80, 111, 443, 2049, 2375, 2376, 2377, 4789, 6817, 6818, 6819, 7946, 8001, 8888, 9100, 29500}
#: A port that nothing uses.
_UNUSED = 40404


def test_machines_have_no_other_port_open(scene: Scene) -> None:
    """Every TCP port on which a machine listens, and the usual ones, at each address of the head node and the nodes."""
    hub = scene.product.cluster.hub
    networks = scene.inspect(scene.notebooks["ben"])["NetworkSettings"]["Networks"].values()
    own = next(node for node in scene.plan.nodes if node.name == scene.notebooks["ben"].node)
    machines = {str(scene.plan.head): None, **{str(node.address): node for node in scene.plan.nodes}}
    machines |= {network["Gateway"]: own for network in networks if network["Gateway"]}
    listening = {address: _list_ports(scene, node) for address, node in machines.items()}
    head = str(scene.plan.head)
    assert {hub.api_port, hub.broker_port} <= listening[head]
    targets = [[address, port] for address, ports in listening.items() for port in sorted(ports | _USUAL_PORTS)]
    found = scene.probe("ports", tcp=targets)
    allowed = {hub.api_port, hub.broker_port, _DNS} | (set() if hub.is_loopback else {hub.port})
    reached = {port for address, port in found["tcp"] if address == head}
    assert {hub.api_port, hub.broker_port} <= reached <= allowed
    assert [target for target in found["tcp"] if target[0] != head] == []


def _list_ports(scene: Scene, node: ClosetNode | None) -> set[int]:
    """Return the TCP ports on which anything listens in a node's network namespace; None is the head node."""
    space = [] if node is None else ["nsenter", f"--net=/run/netns/{scene.plan.netns_name(node)}"]
    shown = subprocess.run(
        [*space, "cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True, check=True
    )
    return _parse_listening(shown.stdout)


def _parse_listening(table: str) -> set[int]:
    """Return the ports in state LISTEN of the kernel's table of sockets."""
    rows = [line.split() for line in table.splitlines()]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == "0A"}


def test_datagrams_reach_no_machine(scene: Scene) -> None:
    """No packet over UDP arrives at a machine, so that overlays' packets cannot be forged, and no service answers."""
    machines = {str(scene.plan.head): None, **{str(node.address): node for node in scene.plan.nodes}}
    with ExitStack() as stack:
        received = {
            address: stack.enter_context(_receiver(address, node and scene.plan.netns_name(node)))
            for address, node in machines.items()
        }
        targets = [[address, port] for address in machines for port in (111, 123, 2049, 4789, 7946, _UNUSED)]
        found = scene.probe("ports", udp=targets)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as head:
            for address in machines:
                head.sendto(b"from the head node", (address, _UNUSED))
        for address, receiver in received.items():
            line = receiver.stdout.readline() if receiver.stdout else ""
            assert line == "from the head node\n", address
    assert len(found["udp"]) == len(targets)
    assert {target for target, answer in found["udp"].items() if answer == "answered"} == set()


@contextmanager
def _receiver(address: str, netns: str | None) -> Iterator[subprocess.Popen[str]]:
    """Print what arrives at a machine's unused port."""
    code = (
        "import socket\n"
        "receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        f"receiver.bind(({address!r}, {_UNUSED}))\n"
        "print('bound', flush=True)\n"
        "while True: print(receiver.recv(100).decode(), flush=True)\n"
    )
    space = [] if netns is None else ["nsenter", f"--net=/run/netns/{netns}"]
    with subprocess.Popen([*space, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "bound\n"
            yield process
        finally:
            process.kill()


def test_metadata_services_are_refused(scene: Scene) -> None:
    """The addresses under which clouds hand out a machine's rights."""
    found = scene.probe("ports", tcp=[["169.254.169.254", 80], ["169.254.169.254", 443], ["169.254.170.2", 80]])
    assert found["tcp"] == []


def test_neighbours_cannot_be_reached(scene: Scene) -> None:
    """Whatever ada's containers listen on, ben reaches it neither by address nor by name nor on the node."""
    targets, listening = [], 0
    for seen in (scene.notebooks["ada"], scene.find_containers("ada", names.KIND_WORKER)[0]):
        described = scene.inspect(seen)
        ports = _parse_listening(scene.shell("cat /proc/net/tcp /proc/net/tcp6", seen=seen)[1])
        listening += len(ports)
        addresses = [network["IPAddress"] for network in described["NetworkSettings"]["Networks"].values()]
        for address in (*filter(None, addresses), described["Name"].lstrip("/")):
            targets += [[address, port] for port in {*ports, 22, 8888, 29500}]
        published = described["NetworkSettings"]["Ports"] or {}
        node = scene.plan.node(seen.node)
        targets += [
            [str(node.address), int(bound["HostPort"])] for bindings in published.values() for bound in bindings or ()
        ]
    assert listening >= 2
    assert scene.probe("ports", tcp=targets)["tcp"] == []
