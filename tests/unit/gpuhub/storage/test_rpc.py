"""One call of ONC RPC."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhub.storage import probe


def reply(*words: int) -> bytes:
    return struct.pack(f">{len(words)}I", *words)


def test_rpc_null_call_matches_the_standard() -> None:
    """RFC 5531: one last piece of 40 bytes, a call of RPC 2, program, version, procedure 0, no credentials."""
    call = probe.build_call(7, probe.NFS_PROGRAM, 4)
    assert struct.unpack(">11I", call) == (0x80000028, 7, 0, 2, 100003, 4, 0, 0, 0, 0, 0)


def test_rpc_replies_are_parsed() -> None:
    """Served; other versions; another program; a server that requires credentials, or sends a verifier."""
    assert probe.parse_reply(7, reply(7, 1, 0, 0, 0, 0)) == probe.NullReply(serves=True)
    assert probe.parse_reply(7, reply(7, 1, 0, 0, 0, 2, 3, 3)) == probe.NullReply(serves=False, lowest=3, highest=3)
    assert probe.parse_reply(7, reply(7, 1, 0, 0, 0, 1)) == probe.NullReply(serves=False)
    assert probe.parse_reply(7, reply(7, 1, 1, 1, 5)) == probe.NullReply(serves=True)
    assert probe.parse_reply(7, reply(7, 1, 0, 0, 5, 9, 9, 2, 3, 4)) == probe.NullReply(
        serves=False, lowest=3, highest=4
    )


@pytest.mark.parametrize("body", [b"", b"\0", reply(8, 1, 0), reply(7, 0, 0), reply(7, 1)])
def test_invalid_rpc_replies_are_refused(body: bytes) -> None:
    """The reply to another call, a call in place of a reply, or too few bytes."""
    with pytest.raises(ValueError, match="not an RPC reply"):
        probe.parse_reply(7, body)


def test_http_response_is_not_an_rpc_reply() -> None:
    """Its first four letters would mean a fragment of a gigabyte."""
    with pytest.raises(ValueError, match="not an RPC reply"):
        probe.parse_fragment_header(b"HTTP")
    assert probe.parse_fragment_header(struct.pack(">I", 0x80000018)) == (24, True)
    assert probe.parse_fragment_header(struct.pack(">I", 24)) == (24, False)


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    """A server may send any bytes."""
    try:
        found = probe.parse_reply(7, body)
    except ValueError:
        return
    assert isinstance(found, probe.NullReply)
