"""One call of ONC RPC."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhub.storage import rpc


def reply(*words: int) -> bytes:
    return struct.pack(f">{len(words)}I", *words)


def test_the_call_is_that_of_the_standard() -> None:
    """RFC 5531: one last piece of 40 bytes, a call of RPC 2, program, version, procedure 0, no credentials."""
    call = rpc.build_call(7, rpc.NFS_PROGRAM, 4)
    assert struct.unpack(">11I", call) == (0x80000028, 7, 0, 2, 100003, 4, 0, 0, 0, 0, 0)


def test_answers_are_told_apart() -> None:
    """Served; other versions; another program; a server that wants credentials, or has a verifier of its own."""
    assert rpc.parse_answer(7, reply(7, 1, 0, 0, 0, 0)) == rpc.Answer(serves=True)
    assert rpc.parse_answer(7, reply(7, 1, 0, 0, 0, 2, 3, 3)) == rpc.Answer(serves=False, lowest=3, highest=3)
    assert rpc.parse_answer(7, reply(7, 1, 0, 0, 0, 1)) == rpc.Answer(serves=False)
    assert rpc.parse_answer(7, reply(7, 1, 1, 1, 5)) == rpc.Answer(serves=True)
    assert rpc.parse_answer(7, reply(7, 1, 0, 0, 5, 9, 9, 2, 3, 4)) == rpc.Answer(serves=False, lowest=3, highest=4)


@pytest.mark.parametrize("body", [b"", b"\0", reply(8, 1, 0), reply(7, 0, 0), reply(7, 1)])
def test_other_answers_are_refused(body: bytes) -> None:
    """Somebody else's call, no reply, or too little."""
    with pytest.raises(ValueError, match="no answer of RPC"):
        rpc.parse_answer(7, body)


def test_a_web_server_is_no_nfs_server() -> None:
    """Its first four letters would be a piece of a gigabyte."""
    with pytest.raises(ValueError, match="no answer of RPC"):
        rpc.piece_length(b"HTTP")
    assert rpc.piece_length(struct.pack(">I", 0x80000018)) == (24, True)
    assert rpc.piece_length(struct.pack(">I", 24)) == (24, False)


@given(st.binary(max_size=200))
def test_whatever_comes_there_is_an_answer_or_a_refusal(body: bytes) -> None:
    """A server may say anything."""
    try:
        found = rpc.parse_answer(7, body)
    except ValueError:
        return
    assert isinstance(found, rpc.Answer)
