"""Streams of programs in containers: Docker's frames, both kinds of connections, and back-pressure."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhub.common.errors import NodeUnreachable
from gpuhub.common.program_session import STDERR, STDOUT
from gpuhub.docker.exec_session import Demultiplexer, ExecSession


def frame(stream: int, data: bytes) -> bytes:
    return struct.pack(">BxxxI", stream, len(data)) + data


@given(st.lists(st.tuples(st.sampled_from([STDOUT, STDERR]), st.binary(max_size=30))), st.integers(1, 40))
def test_frames_are_split_at_any_chunk_boundary(parts: list[tuple[int, bytes]], size: int) -> None:
    """Every byte arrives in order in its stream; empty frames have no effect."""
    sent = b"".join(frame(*part) for part in parts)
    frames = Demultiplexer()
    got = [part for start in range(0, len(sent), size) for part in frames.feed(sent[start : start + size])]
    for stream in (STDOUT, STDERR):
        assert b"".join(data for one, data in got if one == stream) == b"".join(d for one, d in parts if one == stream)
    order = [stream for stream, data in parts if data]
    seen = [stream for stream, data in got for _ in data]
    assert seen == [stream for stream, data in parts for _ in data]
    assert bool(order) == bool(got)


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS contexts of a server and of a client that trusts it."""
    folder = Path(tmp_path_factory.mktemp("tls"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=rig", "-addext", "subjectAltName=DNS:rig", "-keyout", "key.pem", "-out", "cert.pem"],
        check=True, capture_output=True, cwd=folder,
    )  # fmt: skip
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return server, ssl.create_default_context(cafile=str(folder / "cert.pem"))


@pytest.fixture(params=["unix", "tls"])
def pair(request: pytest.FixtureRequest, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> Iterator[tuple[Any, Any]]:
    """The two ends of a connection as docker-py returns it: a file around a Unix socket, or a TLS socket."""
    ours, theirs = socket.socketpair()
    if request.param == "unix":
        file: Any = socket.SocketIO(ours, "rwb")
        yield file, theirs
    else:
        found: list[Any] = []
        server = threading.Thread(target=lambda: found.append(contexts[0].wrap_socket(theirs, server_side=True)))
        server.start()
        file = contexts[1].wrap_socket(ours, server_hostname="rig")
        server.join()
        theirs = found[0]
        yield file, theirs
    theirs.close()
    ours.close()


async def test_concurrent_transfer_in_both_directions(pair: tuple[Any, Any]) -> None:
    """More data than any buffer holds passes in both directions at different speeds, and the end is reported."""
    file, theirs = pair
    sent = os.urandom(3 * 1024**2)
    taken = io.BytesIO()

    def serve() -> None:
        while taken.tell() < len(sent):
            data = theirs.recv(65536)
            taken.write(data)
            theirs.sendall(frame(STDOUT, data[: len(data) // 2]) + frame(STDERR, data[len(data) // 2 :]))
        theirs.close()

    serving = threading.Thread(target=serve)
    serving.start()
    one = ExecSession("rig1", file)
    sending = asyncio.ensure_future(one.send(sent))
    got = b""
    while (part := await one.read()) is not None:
        got += part[1]
    await sending
    serving.join()
    one.close()
    assert (got, taken.getvalue()) == (sent, sent)


async def test_sender_waits_for_the_receiver(pair: tuple[Any, Any]) -> None:
    """The sender waits, and fails when the other side disconnects."""
    file, theirs = pair
    one = ExecSession("rig1", file)
    sending = asyncio.ensure_future(one.send(bytes(64 * 1024**2)))
    done, _ = await asyncio.wait({sending}, timeout=0.2)
    assert not done
    with closing(theirs):
        theirs.shutdown(socket.SHUT_RDWR)
    with pytest.raises(NodeUnreachable, match="node rig1: the connection to the container was lost"):
        await asyncio.wait_for(sending, 30)
    one.close()


async def test_close_ends_a_pending_read_on_both_sides(pair: tuple[Any, Any]) -> None:
    """A read that waits ends, and the other side sees the end of its input."""
    file, theirs = pair
    one = ExecSession("rig1", file)
    reading = asyncio.ensure_future(one.read())
    await asyncio.sleep(0)
    one.close()
    one.close()
    assert await asyncio.wait_for(reading, 30) is None
    theirs.settimeout(30)
    with suppress(ssl.SSLEOFError):  # the same, as reported by TLS
        assert theirs.recv(1) == b""


async def test_endless_output_leaves_turns_for_other_tasks() -> None:
    """A program that always has output does not keep the event loop for itself, nor does one that reads all input."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1024**2)
    theirs.sendall(frame(STDOUT, b"x") * 1000)
    one = ExecSession("rig1", ours)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(count_turns())
    for _ in range(1000):
        await one.read()
    assert turns >= 1000
    turns = 0
    for _ in range(1000):
        await one.send(b"x")
    assert turns >= 1000
    other.cancel()
    one.close()
    theirs.close()
