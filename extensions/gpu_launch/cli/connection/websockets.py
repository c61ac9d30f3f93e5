"""WebSockets to the broker and to a user's notebook server."""

from __future__ import annotations

import ssl
import threading
import urllib.parse
from collections.abc import Mapping
from typing import Any

from gpu_launch.broker.problems import build_error
from gpu_launch.cli.connection.credentials import Hub
from gpu_launch.cli.connection.http import build_tls_context, describe_error
from gpu_launch.errors import BrokerError

_CONNECT_S = 30.0
#: Seconds between pings.
_PING_S = 25.0


def build_job_url(hub: Hub, job_id: str, route: str, query: Mapping[str, Any]) -> str:
    """Return the URL of a job's WebSocket at the broker."""
    base = "ws" + hub.broker_url.removeprefix("http")
    return f"{base}/api/v1/jobs/{urllib.parse.quote(job_id, safe='')}/{route}?{urllib.parse.urlencode(query)}"


def open_websocket(hub: Hub, url: str) -> Any:
    """Open a WebSocket with the hub's token.

    Raises:
        BrokerError: It is refused, or the hub cannot be reached.
    """
    import websocket

    tls: ssl.SSLContext | None = build_tls_context(hub)
    try:
        socket = websocket.create_connection(
            url,
            timeout=_CONNECT_S,
            header=[f"Authorization: token {hub.token}"],
            sslopt={} if tls is None else {"context": tls},
            # A proxy for the internet does not lead to the hub; all other requests ignore it too.
            http_no_proxy=["*"],
            enable_multithread=True,
            redirect_limit=0,
            suppress_origin=True,
        )
    except websocket.WebSocketBadStatusException as error:
        body = error.resp_body if isinstance(error.resp_body, bytes) else b""
        raise build_error(error.status_code, body, hub.url or hub.page_url) from None
    except (websocket.WebSocketException, OSError) as error:
        raise BrokerError(f"{hub.url or hub.broker_url} cannot be reached: {describe_error(error)}.") from None
    socket.settimeout(None)
    return socket


def start_pings(socket: Any, is_over: threading.Event) -> None:
    """Ping in a thread until `is_over` is set, which keeps proxies from closing an idle connection."""
    import websocket

    def ping() -> None:
        while not is_over.wait(_PING_S):
            try:
                socket.ping()
            except (websocket.WebSocketException, OSError):
                return

    threading.Thread(target=ping, daemon=True).start()
