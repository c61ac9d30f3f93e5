"""A way for all programs in this container to the cluster's services, such as MLflow, without a token.

It listens on the container's own loopback and passes requests for `/services/NAME/` on to the broker: from a notebook
with its token, from a worker with the key of its job. So scripts, pip and others need an address and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from gpu_launch.common.client_tls import load_own_tls
from gpu_launch.environment import Environment
from gpu_launch.errors import GpuLaunchError

if TYPE_CHECKING:
    # Only notebook images have it.
    from aiohttp import web

#: Connections to the broker, which lets a user send this many requests to services at once.
_MAX_CONNECTIONS = 16
_CONNECT_S = 30.0
#: Headers that are not forwarded: hop-by-hop headers, credentials of this container, and headers set below.
_NOT_SENT = frozenset(
    {
        "authorization", "connection", "cookie", "host", "keep-alive", "proxy-authorization", "proxy-connection", "te",
        "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
_NOT_RETURNED = frozenset({"connection", "date", "keep-alive", "server", "trailer", "transfer-encoding", "upgrade"})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Where the gateway listens, and where requests go."""

    host: str
    port: int
    #: Such as `https://10.77.0.1:8010`.
    broker: str
    #: Names of the services.
    services: frozenset[str]
    #: The header with which requests are sent on.
    authorization: str


def find_settings(env: Environment) -> GatewaySettings | None:
    """Return the settings of this container's gateway; None where no service is offered in it."""
    authorization = f"Job {env.job_key}" if env.job_key else f"token {env.token}" if env.token else ""
    if not (env.services and env.services_address and env.broker_url and authorization):
        return None
    host, _, port = env.services_address.rpartition(":")
    broker = urlsplit(env.broker_url)
    return GatewaySettings(
        host=host,
        port=int(port),
        broker=urlunsplit((broker.scheme, broker.netloc, "", "", "")),
        services=frozenset(env.services),
        authorization=authorization,
    )


def start_in_thread(env: Environment) -> threading.Thread | None:
    """Run this container's gateway in a thread until the process ends, if services are offered here.

    It listens when this returns: who asks before the thread has loaded its modules waits for an answer, and is not
    refused. A gateway that cannot listen is reported in the log: what else runs here does not depend on it.
    """
    settings = find_settings(env)
    if settings is None:
        return None
    try:
        listener = socket.create_server((settings.host, settings.port))
    except OSError as error:
        _report(error)
        return None
    thread = threading.Thread(target=_run, args=(settings, env, listener), name="services", daemon=True)
    thread.start()
    return thread


def _run(settings: GatewaySettings, env: Environment, listener: socket.socket) -> None:
    try:
        with listener:
            asyncio.run(_serve_for_ever(settings, env, listener))
    except (OSError, GpuLaunchError) as error:
        _report(error)


def _report(error: Exception) -> None:
    log.warning("services cannot be reached from here: %s", error)


async def _serve_for_ever(settings: GatewaySettings, env: Environment, listener: socket.socket) -> None:
    tls = load_own_tls(env)
    gateway = ServiceGateway(settings, tls=tls)
    try:
        await gateway.start(listener)
        await asyncio.Event().wait()
    finally:
        await gateway.close()


class ServiceGateway:
    """The gateway. It keeps no request: bodies pass through in parts, both ways."""

    def __init__(self, settings: GatewaySettings, *, tls: Any = None) -> None:
        """`tls` is the `SSLContext` for the broker; None for a broker without TLS."""
        self._settings = settings
        self._tls = tls
        self._session: Any = None
        self._runner: Any = None

    async def start(self, listener: socket.socket) -> None:
        """Answer the connections of a socket that listens; `close` must follow, also after an error."""
        import aiohttp
        from aiohttp import web

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._tls or True, limit=_MAX_CONNECTIONS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            # A proxy for the internet does not lead to the head node.
            trust_env=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
        server = web.Server(self._handle)
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()

    async def close(self) -> None:
        """Close all connections."""
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        import aiohttp
        from aiohttp import web
        from yarl import URL

        if (refusal := self._explain_refusal(request.raw_path)) is not None:
            return web.Response(status=404, text=refusal)
        response = web.StreamResponse()
        try:
            async with self._session.request(
                request.method,
                URL(self._settings.broker + request.raw_path, encoded=True),
                headers=self._build_headers(request.headers),
                data=request.content if request.can_read_body else None,
                allow_redirects=False,
            ) as answer:
                response.set_status(answer.status, answer.reason)
                for name, value in answer.headers.items():
                    if name.lower() not in _NOT_RETURNED:
                        response.headers.add(name, value)
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectorError as error:
            # The broker restarts; clients of services try again by themselves.
            text = f"gpuhub's broker does not answer ({error}); try again\n"
            return web.Response(status=503, text=text, headers={"Retry-After": "2"})
        except aiohttp.ClientError as error:
            if response.prepared and request.transport is not None:
                # The answer has begun: a broken connection alone tells the client that it is incomplete.
                request.transport.abort()
                return response
            return web.Response(status=502, text=f"gpuhub's broker has closed the connection ({error}); try again\n")

    def _explain_refusal(self, path: str) -> str | None:
        """Return why a path is not passed on, None if it is."""
        _, _, name = path.partition("/services/")
        name = name.partition("?")[0].partition("/")[0]
        if path.startswith("/services/") and name in self._settings.services:
            return None
        known = ", ".join(f"/services/{service}/" for service in sorted(self._settings.services))
        return f"There is nothing at this address. Here are: {known}\n"

    def _build_headers(self, received: Mapping[str, str]) -> list[tuple[str, str]]:
        kept = [(name, value) for name, value in received.items() if name.lower() not in _NOT_SENT]
        return [*kept, ("Authorization", self._settings.authorization)]
