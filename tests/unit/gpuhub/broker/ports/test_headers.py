"""Redirects of jobs' servers, and the scheme of their addresses."""

from __future__ import annotations

import pytest

from gpuhub.broker.ports.headers import PortUrl, build_response_headers, find_scheme, rewrite_location

URL = PortUrl(scheme="https", host="hub.lan", prefix="/services/broker/visits/j1/key/", port=8000)
ROOT = URL.prefix


@pytest.mark.parametrize(
    ("location", "sent"),
    [
        ("/", ROOT), ("/a?b=c#d", f"{ROOT}a?b=c#d"), ("", ""), ("a/b", "a/b"), ("?x", "?x"), ("../up", "../up"),
        (f"{ROOT}a", f"{ROOT}a"), ("http://localhost:8000/a", f"{ROOT}a"), ("http://127.0.0.1:8000", ROOT),
        ("https://hub.lan/hub/logout", f"{ROOT}hub/logout"), ("http://localhost:9000/", "http://localhost:9000/"),
        ("https://evil.lan/x", "https://evil.lan/x"), ("//evil.lan/x", "//evil.lan/x"),
        ("javascript:alert(1)", "javascript:alert(1)"), ("http://[bad", ROOT),
    ],
)  # fmt: skip
def test_redirects_of_the_server_itself_stay_below_its_address(location: str, sent: str) -> None:
    """The hub's own pages are no targets, and other sites stay what they are."""
    assert rewrite_location(location, URL) == sent


@pytest.mark.parametrize(
    ("forwarded", "scheme"), [(None, "http"), ("https", "https"), ("http,https", "https"), ("https, evil", "http")]
)
def test_scheme_is_that_of_the_last_hop(forwarded: str | None, scheme: str) -> None:
    """Earlier ones are what the client made up."""
    assert find_scheme(forwarded) == scheme


def test_headers_of_one_connection_stay_there() -> None:
    """Those that `Connection` names too."""
    received = [
        (b"Connection", b"close, X-Hop"),
        (b"X-Hop", b"1"),
        (b"Transfer-Encoding", b"chunked"),
        (b"X-App", b"2"),
    ]
    names = [name for name, _ in build_response_headers(received, url=URL, is_opaque=False)]
    assert names == [b"X-App", b"content-security-policy", b"referrer-policy"]
