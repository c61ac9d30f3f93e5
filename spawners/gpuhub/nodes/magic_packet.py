"""Wake-on-LAN: the packet that wakes a machine whose network card listens for it.

The format is AMD's "Magic Packet Technology" (publication 20213, 1995): six bytes 0xff, and 16 times the card's
address. Wherever it occurs in a frame, the card recognizes it; here it is a UDP datagram to the discard port.
"""

from __future__ import annotations

import socket

from gpuhub.common.errors import GpuhubError
from gpuhub.config.own_address import find_source_address

#: UDP's discard service, to which nothing listens.
DISCARD_PORT = 9
_LIMITED_BROADCAST = "255.255.255.255"


def build_magic_packet(mac: str) -> bytes:
    """Return the 102 bytes for a card's address such as `3c:ec:ef:12:34:56`."""
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "")) * 16


def send_magic_packet(mac: str, *, towards: str, broadcast: str = _LIMITED_BROADCAST) -> None:
    """Send the packet to all machines of a network. Nobody answers it.

    Args:
        mac: The card's address.
        towards: Address of the node. The limited broadcast leaves on the interface of the route to it: Linux chooses
            the interface of the socket's own address for it, and that of the default route without one.
        broadcast: The network's broadcast address.

    Raises:
        GpuhubError: There is no route to the network.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            source = find_source_address(towards)
            if broadcast == _LIMITED_BROADCAST and source is not None and ":" not in source:
                sender.bind((source, 0))
            sender.sendto(build_magic_packet(mac), (broadcast, DISCARD_PORT))
    except OSError as error:
        raise GpuhubError(f"no magic packet can be sent to {broadcast}: {error.strerror or error}") from error
