"""Whether NFS servers answer."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from gpuhub.common.errors import StorageUnavailable
from gpuhub.storage import probe
from gpuhub.storage.blocking_calls import BlockingCallPool
from gpuhub.storage.probe import NfsProber, NfsServer, find_servers
from tests.support.broker.in_process import until
from tests.support.nfs import encode_accepted_reply, encode_record, serve_reply


def server(port: int, version: int = 4, host: str = "127.0.0.1") -> NfsServer:
    return NfsServer(host=host, port=port, version=version)


def test_file_servers_are_listed_once_with_their_port() -> None:
    """Homes and datasets mostly have the same one; paths have none."""
    places = ("nfs://nas/home/{username}", "nfs://nas/data", "/srv", None)
    assert find_servers(places, "nfsvers=4.2,port=2050") == [NfsServer(host="nas", port=2050, version=4)]
    assert find_servers(("/srv/{username}", None), "") == []
    assert find_servers(("nfs://[fd00::1]/x",), "")[0].host == "fd00::1"


async def test_successful_server_probe_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the version of the mount; many starts at once do not become many questions."""
    prober = NfsProber(BlockingCallPool())
    with serve_reply(encode_accepted_reply) as (port, asked):
        await prober.ensure_answers(server(port), 10)
        await prober.ensure_answers(server(port), 10)
        assert asked == [4]
        monkeypatch.setattr(probe, "SUCCESS_CACHE_S", 0.0)
        await prober.ensure_answers(server(port), 10)
        assert asked == [4, 4]


async def test_unresponsive_server_is_reported_within_the_timeout() -> None:
    """The server accepts connections without a reply, like one whose disk hangs; the next caller fails at once."""
    prober = NfsProber(BlockingCallPool())
    with serve_reply(lambda _xid: None) as (port, asked):
        began = time.monotonic()
        with pytest.raises(StorageUnavailable, match=rf"file server 127\.0\.0\.1 \(port {port}\) does not answer"):
            await prober.ensure_answers(server(port), 1)
        assert time.monotonic() - began < 10
        with pytest.raises(StorageUnavailable, match="does not answer"):
            await prober.ensure_answers(server(port), 1)
        assert len(asked) == 1


async def test_server_that_recovers_is_probed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is remembered for a moment only."""
    monkeypatch.setattr(probe, "FAILURE_CACHE_S", 0.0)
    pool = BlockingCallPool()
    prober = NfsProber(pool)
    replies = [None, encode_accepted_reply]
    with serve_reply(lambda xid: reply(xid) if (reply := replies.pop(0)) else None) as (port, _):
        with pytest.raises(StorageUnavailable):
            await prober.ensure_answers(server(port), 0.2)
        await until(lambda: not pool.count_overdue(server(port).target), "the silent question is over")
        await prober.ensure_answers(server(port), 10)
        assert replies == []


def test_each_server_problem_has_its_message() -> None:
    """Each problem has a text as precise as the head node can determine."""
    with serve_reply(lambda xid: encode_record(xid, 1, 0, 0, 0, 2, 3, 3)) as (port, _):
        assert "serves NFS versions 3 to 3, and not 4: nfs_options" in str(probe.probe_server(server(port), 5))
    with serve_reply(lambda xid: encode_record(xid, 1, 0, 0, 0, 1)) as (port, _):
        assert "does not serve NFS on port" in str(probe.probe_server(server(port), 5))
    with serve_reply(lambda _xid: b"HTTP/1.1 400 Bad Request\r\n\r\n") as (port, _):
        assert "not as an NFS server does" in str(probe.probe_server(server(port), 5))
    with serve_reply(lambda _xid: b"") as (port, _):
        assert "cannot be reached from the head node: it closes the connection" in str(
            probe.probe_server(server(port), 5)
        )
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert f"refuses connections to port {port}" in str(probe.probe_server(server(port), 5))
    assert "its name cannot be looked up" in str(probe.probe_server(server(1, host="nas.invalid"), 5))


def test_fragmented_reply_is_accepted() -> None:
    """RPC allows it, and so does TCP."""
    whole = encode_accepted_reply(0)[4:]

    def answer_in_fragments(xid: int) -> bytes:
        body = xid.to_bytes(4, "big") + whole[4:]
        return (8).to_bytes(4, "big") + body[:8] + (0x80000000 | len(body) - 8).to_bytes(4, "big") + body[8:]

    with serve_reply(answer_in_fragments) as (port, _):
        assert probe.probe_server(server(port), 5) is None


async def test_unresponsive_servers_do_not_block_the_event_loop() -> None:
    """Twenty waiting starts get the error, and another server's start is not delayed."""
    prober = NfsProber(BlockingCallPool())
    with serve_reply(lambda _xid: None) as (dead, _), serve_reply(encode_accepted_reply) as (alive, _):
        waiting = [asyncio.ensure_future(prober.ensure_answers(server(dead), 8)) for _ in range(20)]
        await prober.ensure_answers(server(alive), 10)
        assert not any(one.done() for one in waiting)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {StorageUnavailable}
