"""Magic packets between network namespaces: what arrives, and where."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpuhub.nodes.magic_packet import build_magic_packet
from tests.support.network_namespaces import Machines, machines

MAC = "3c:ec:ef:12:34:56"
LISTEN = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
    receiver.bind(("", 9))
    receiver.settimeout(5)
    print("ready", flush=True)
    try:
        print(receiver.recv(2048).hex())
    except TimeoutError:
        print("nothing")
"""
SEND = "import sys; from gpuhub.nodes.magic_packet import send_magic_packet as send; send(*sys.argv[1:2], towards=sys.argv[2], broadcast=sys.argv[3])"

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def network() -> Iterator[Machines]:
    """A sender with a second, faster network that has its default route; the sleeping node is in the first one."""
    with machines("gpuhub-wol", "10.98.41", 2) as made, machines("gpuhub-wox", "10.98.42", 1) as other:
        sender, further = made.namespace(0), other.namespace(0)
        link = ("ip", "link", "add", "eth1", "netns", sender, "type", "veth", "peer", "name", "eth1", "netns", further)
        for command in (
            link,
            ("ip", "-netns", sender, "addr", "add", "10.98.43.1/24", "dev", "eth1"),
            ("ip", "-netns", further, "addr", "add", "10.98.43.2/24", "dev", "eth1"),
            ("ip", "-netns", sender, "link", "set", "eth1", "up"),
            ("ip", "-netns", further, "link", "set", "eth1", "up"),
            ("ip", "-netns", sender, "route", "add", "default", "via", "10.98.43.2"),
        ):
            subprocess.run(command, check=True)
        yield made


@pytest.mark.parametrize("broadcast", ["255.255.255.255", "10.98.41.255"])
def test_packet_arrives_on_the_nodes_network(network: Machines, broadcast: str) -> None:
    """Also by the broadcast that leaves on the interface of the default route unless the sender chooses another."""
    listening = subprocess.Popen(network.enter(1, sys.executable, "-c", LISTEN), stdout=subprocess.PIPE, text=True)
    assert listening.stdout is not None
    assert listening.stdout.readline() == "ready\n"
    subprocess.run(network.enter(0, sys.executable, "-c", SEND, MAC, network.address(1), broadcast), check=True)
    output, _ = listening.communicate(timeout=20)
    assert bytes.fromhex(output) == build_magic_packet(MAC)
