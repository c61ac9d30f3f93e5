"""Prints the highest speed that each network port of this machine supports, as lines `port=INTERFACE MBIT_PER_S`.

Linux reports it for ports with a driver for real hardware; others, such as veth and virtio, get no line.
The probe of a node passes this file's text to `python3 -c`, so it imports nothing of gpuhub.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from array import array
from collections.abc import Iterator

_SIOCETHTOOL = 0x8946
_ETHTOOL_GLINKSETTINGS = 0x4C
#: `struct ethtool_link_settings` without its masks, and the place of the number of 32-bit words of each mask in it.
_HEADER_BYTES = 48
_WORD_COUNT_OFFSET = 15
_WORD_BYTES = 4
#: Supported, advertised, and advertised by the other end.
_MASKS = 3
#: Mb/s → bits of the modes in `linux/ethtool.h` (ETHTOOL_LINK_MODE_…_BIT), as ranges. Bits from 93 on are unknown here.
_MODES: dict[int, tuple[range, ...]] = {
    10: (range(2), range(92, 93)),
    100: (range(2, 4), range(67, 68), range(90, 92)),
    1000: (range(4, 6), range(17, 18), range(41, 42), range(68, 69)),
    2500: (range(15, 16), range(47, 48)),
    5000: (range(48, 49),),
    10_000: (range(12, 13), range(18, 20), range(42, 47)),
    20_000: (range(21, 23),),
    25_000: (range(31, 34),),
    40_000: (range(23, 27),),
    50_000: (range(34, 36), range(40, 41), range(52, 57)),
    56_000: (range(27, 31),),
    100_000: (range(36, 40), range(57, 62), range(75, 80)),
    200_000: (range(62, 67), range(80, 85)),
    400_000: (range(69, 74), range(85, 90)),
}


def parse_max_speed(settings: bytes) -> int | None:
    """Return the highest supported speed in a `struct ethtool_link_settings`, Mb/s; None where it names no mode."""
    (count,) = struct.unpack_from("=b", settings, _WORD_COUNT_OFFSET)
    words = struct.unpack_from(f"={count}I", settings, _HEADER_BYTES)
    mask = sum(word << 32 * position for position, word in enumerate(words))
    speeds = (speed for speed, ranges in _MODES.items() if any(mask >> bit & 1 for bits in ranges for bit in bits))
    return max(speeds, default=None)


def read_link_settings(interface: str) -> bytes:
    """Return an interface's `struct ethtool_link_settings` with its masks, as the kernel wrote it.

    Raises:
        OSError: The interface does not exist, or has no such settings.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        # The kernel answers a request for masks of no words with the negated number of words that it has.
        (negated,) = struct.unpack_from("=b", _query(handle, interface, 0), _WORD_COUNT_OFFSET)
        return _query(handle, interface, -negated)


def _query(handle: socket.socket, interface: str, words: int) -> bytes:
    settings = array("B", bytes(_HEADER_BYTES + _MASKS * words * _WORD_BYTES))
    struct.pack_into("=I", settings, 0, _ETHTOOL_GLINKSETTINGS)
    struct.pack_into("=b", settings, _WORD_COUNT_OFFSET, words)
    address, _ = settings.buffer_info()
    fcntl.ioctl(handle, _SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), address))
    return settings.tobytes()


def list_max_speeds() -> Iterator[tuple[str, int]]:
    """Yield each interface whose supported modes are known with its highest supported speed, Mb/s."""
    for _, interface in socket.if_nameindex():
        try:
            speed = parse_max_speed(read_link_settings(interface))
        except OSError:
            continue
        if speed is not None:
            yield interface, speed


def main() -> None:
    """Print a line for each port."""
    for interface, speed in list_max_speeds():
        sys.stdout.write(f"port={interface} {speed}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
