"""The packet of Wake-on-LAN."""

from __future__ import annotations

import pytest

from gpuhub.common.errors import GpuhubError
from gpuhub.nodes.magic_packet import build_magic_packet, send_magic_packet


def test_packet_repeats_the_address_after_six_bytes() -> None:
    """Six bytes 0xff, and the card's address 16 times."""
    packet = build_magic_packet("3c:ec:ef:12:34:56")
    assert len(packet) == 102
    assert packet == bytes([255] * 6) + bytes([0x3C, 0xEC, 0xEF, 0x12, 0x34, 0x56]) * 16


def test_address_that_no_packet_reaches_is_named() -> None:
    """A broadcast address that belongs to no network of the head node is refused by its kernel or has no route."""
    with pytest.raises(GpuhubError, match=r"no magic packet can be sent to 0\.0\.0\.256"):
        send_magic_packet("3c:ec:ef:12:34:56", towards="127.0.0.1", broadcast="0.0.0.256")
