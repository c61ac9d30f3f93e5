"""What a job's server may send in front of its answer."""

from __future__ import annotations

import httpcore
import pytest

from gpuhub.broker.ports.connections import _InformationalLimit

EARLY = b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\n"
BODY = b"HTTP/1.1 100 \r\n\r\n" * 10_000


def check(*parts: bytes) -> None:
    limit = _InformationalLimit()
    limit.begin()
    for part in parts:
        limit.check(part)


@pytest.mark.parametrize("size", [1, 7, 11, 16 * 1024])
def test_informational_responses_without_end_are_refused(size: int) -> None:
    """However they are cut into parts, and also where a header looks like the beginning of another response."""
    flood = b"HTTP/1.1 100 \r\nX: HTTP/1.1 200\r\n\r\n" * 3000
    with pytest.raises(httpcore.RemoteProtocolError, match="without end"):
        check(*(flood[at : at + size] for at in range(0, len(flood), size)))


@pytest.mark.parametrize("size", [1, 11, 16 * 1024])
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\n" + BODY,
        EARLY + b"HTTP/1.1 200 OK\r\n\r\n" + BODY,
        EARLY * 3 + b"HTTP/1.0 404 x\r\n\r\n" + BODY,
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + BODY,
        b"\x81\x02hi" * 20_000,
        b"short",
    ],
    ids=["plain", "early hints", "several", "websocket", "frames", "short"],
)
def test_answers_pass(answer: bytes, size: int) -> None:
    """Whatever their bodies contain."""
    check(*(answer[at : at + size] for at in range(0, len(answer), size)))


def test_each_request_has_the_whole_limit() -> None:
    """Connections are kept for the next one."""
    limit = _InformationalLimit()
    for _ in range(3):
        limit.begin()
        limit.check(EARLY * 1000)
        limit.check(b"HTTP/1.1 200 OK\r\n\r\n")
