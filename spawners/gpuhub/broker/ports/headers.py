"""Headers of requests to servers of jobs and to services, and of their responses.

A job's server runs a user's code, and a service shows what users send it: it gets no cookie and no token of its
visitors, and its responses have only headers that cannot change what a browser keeps for the hub.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

Headers = list[tuple[bytes, bytes]]

#: A page of a job's server is alone in an origin without a name: it has no cookies, reads nothing of the hub, and sends
#: the hub nothing with the user's session. It may run scripts and do what does not need the hub's origin.
SANDBOX = b"sandbox allow-downloads allow-forms allow-modals allow-pointer-lock allow-popups allow-scripts"
#: The origin of such a page in its requests.
OPAQUE_ORIGIN = b"null"

#: Hop-by-hop headers, which belong to one connection and are not forwarded.
_HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip
#: Secrets of the visitor, and what is set again below.
_NOT_SENT = _HOP_BY_HOP | {
    b"authorization", b"cookie", b"expect", b"forwarded", b"host", b"origin", b"referer", b"x-gradio-server",
    b"x-real-ip", b"x-scheme", b"x-xsrftoken",
}  # fmt: skip
_NOT_SENT_PREFIXES = (b"x-forwarded-", b"sec-websocket-")
#: All others could set cookies, clear the hub's storage, register workers, or ask for a password.
_RETURNED = frozenset(
    {
        b"accept-ranges", b"age", b"allow", b"cache-control", b"date", b"etag", b"expires", b"last-modified",
        b"pragma", b"retry-after", b"server-timing", b"vary",
    }
)  # fmt: skip
_RETURNED_PREFIXES = (b"content-", b"openai-", b"x-")
#: Headers that make a web server in front of the hub send a file of its own.
_PROXY_COMMANDS = (b"x-accel-", b"x-sendfile", b"x-lighttpd-")
_OWN_HOSTS = ("localhost", "127.0.0.1", "0.0.0.0", "[::1]")  # noqa: S104 - names of a job's server for itself


@dataclass(frozen=True, slots=True, kw_only=True)
class PortUrl:
    """Where visitors find a job's server: the hub's scheme and host, and the path with a slash at its end."""

    scheme: str
    host: str
    prefix: str
    #: The server's port in its container.
    port: int

    @property
    def upstream_host(self) -> str:
        """Return the host by which the server is addressed in its container."""
        return f"localhost:{self.port}"


def find_scheme(forwarded: str | None) -> str:
    """Return the scheme that the hub's proxy, the last hop, received: `https` or `http`."""
    last = (forwarded or "").rpartition(",")[2].strip()
    return last if last in {"http", "https"} else "http"


def build_request_headers(
    received: Iterable[tuple[bytes, bytes]], *, url: PortUrl, visitor: str, is_navigation: bool = False
) -> Headers:
    """Return the headers for the job's server: without secrets, and with the visitor's name."""
    received = list(received)
    dropped = _NOT_SENT | _list_connection_headers(received)
    headers = [
        (name, value)
        for name, value in received
        if name.lower() not in dropped and not name.lower().startswith(_NOT_SENT_PREFIXES)
    ]
    headers += [
        (b"host", url.upstream_host.encode()),
        (b"x-forwarded-proto", url.scheme.encode()),
        (b"x-forwarded-prefix", url.prefix.rstrip("/").encode()),
        (b"x-forwarded-user", visitor.encode()),
        # Gradio's own, for the addresses in its pages.
        (b"x-gradio-server", f"{url.scheme}://{url.host}{url.prefix}".encode("latin-1", "replace")),
    ]
    names = {name.lower() for name, _ in received}
    if b"origin" in names:
        # Who sends a request here has shown the right to it; servers compare this with the host.
        headers.append((b"origin", f"http://{url.upstream_host}".encode()))
    if is_navigation:
        # Pages are read on their way, see `pages`.
        headers = [(name, value) for name, value in headers if name.lower() != b"accept-encoding"]
    if b"transfer-encoding" in names and b"content-length" not in names:
        headers.append((b"transfer-encoding", b"chunked"))
    return headers


def build_response_headers(received: Sequence[tuple[bytes, bytes]], *, url: PortUrl, is_opaque: bool) -> Headers:
    """Return the headers for the visitor; `is_opaque` is for a request of a sandboxed page."""
    dropped = _HOP_BY_HOP | _list_connection_headers(received)
    headers = [
        (name, value)
        for name, value in received
        if name.lower() not in dropped
        and (name.lower() in _RETURNED or name.lower().startswith(_RETURNED_PREFIXES))
        and not name.lower().startswith(_PROXY_COMMANDS)
    ]
    for name, value in received:
        if name.lower() == b"location":
            headers.append((b"location", rewrite_location(value.decode("latin-1"), url).encode("latin-1", "replace")))
    return [*headers, *build_own_headers(is_opaque=is_opaque, names=[name for name, _ in headers])]


def build_own_headers(*, is_opaque: bool, names: Sequence[bytes] = ()) -> Headers:
    """Return the headers that every response has; `names` are those that a sandboxed page may read."""
    own = [(b"content-security-policy", SANDBOX), (b"referrer-policy", b"no-referrer")]
    if is_opaque:
        # Its own addresses are another origin for such a page.
        own += [
            (b"access-control-allow-origin", OPAQUE_ORIGIN),
            (b"access-control-allow-credentials", b"true"),
            (b"access-control-expose-headers", b", ".join(dict.fromkeys(name.lower() for name in names))),
        ]
    return own


def build_preflight_headers(requested: bytes | None) -> Headers:
    """Return the answer to a sandboxed page that asks whether it may send a request with these headers."""
    return [
        *build_own_headers(is_opaque=True),
        (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
        (b"access-control-allow-headers", requested or b""),
        (b"access-control-max-age", b"600"),
        (b"content-length", b"0"),
    ]


def rewrite_location(location: str, url: PortUrl) -> str:
    """Return where a redirect of the job's server leads its visitors; other sites stay what they are."""
    try:
        parts = urlsplit(location)
        is_own = parts.netloc.lower() in {url.host.lower(), *(f"{host}:{url.port}" for host in _OWN_HOSTS)}
    except ValueError:
        return url.prefix
    if parts.netloc and not is_own:
        return location
    if not parts.netloc and (parts.scheme or not parts.path.startswith("/")):
        return location
    path = parts.path or "/"
    if not path.startswith(url.prefix):
        path = url.prefix + path.lstrip("/")
    return urlunsplit(("", "", path, parts.query, parts.fragment))


def _list_connection_headers(received: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Return the names of headers that a `Connection` header declares to be of one connection."""
    return frozenset(
        part.strip().lower() for name, value in received if name.lower() == b"connection" for part in value.split(b",")
    )
