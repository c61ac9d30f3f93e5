"""Waits for the answer of a notebook server: at its start, and after a restart of the hub.

JupyterHub waits for a restored notebook to answer without checking whether it still runs. The wait must be long (its
node may be unreachable for days), so a container that ends in the meantime would leave a server that can be neither
used nor stopped.

The program that answers belongs to the user, and its answer must neither fill the hub's memory nor keep the hub from
starting: JupyterHub fails on any error except a timeout, and on an invalid version. So only the headers of an answer
are read, by a client that has a limit for them, keeps no cookies, and neither decompresses a body nor follows a
redirect.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
from jupyterhub.utils import url_path_join
from packaging.version import InvalidVersion, Version

from gpuhub.broker_api.schemas import LeaseState
from gpuhub.common.errors import GpuhubError, NodeSilent
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.container_lifecycle import inspect_container
from gpuhub.spawners.notebook_lease import LeaseBroker

#: Time between two attempts at all starts together, seconds. JupyterHub's own wait backs off to seconds, which delays
#: the start. An attempt takes the hub two milliseconds.
_ATTEMPT_PERIOD_S = 0.025
#: Maximum time between two attempts at one of many starts, seconds.
_LONGEST_PERIOD_S = 0.5
#: Interval between two attempts of a start that has lasted for `_LATER_S`: what is not ready by then is slow, or
#: answers wrongly on purpose; seconds.
_LATER_PERIOD_S = 1.0
#: Time after which `_LATER_PERIOD_S` applies, seconds.
_LATER_S = 30.0
#: Time between two checks whether a notebook still runs, seconds: at a start, and after a restart of the hub.
_CHECK_PERIOD_S = 1.0
RECOVERY_CHECK_PERIOD_S = 3.0
#: Maximum duration of an attempt, seconds.
_ATTEMPT_TIMEOUT_S = 5.0
#: Maximum time for which Docker may report nothing of a container that starts, seconds; attempts to connect end sooner.
_SILENCE_S = 120.0
#: Maximum length of the version that is passed on to JupyterHub, which parses it, characters.
_MAX_VERSION = 64
_VERSION_HEADER = "X-JupyterHub-Version"
#: When each wait in progress began, by the event loop's clock.
_begun: list[float] = []


async def wait_container_ready(
    daemons: DockerClients, node: str, container: str, url: str, *, tls: ssl.SSLContext | None = None
) -> None:
    """Return as soon as the notebook in a container answers (see `wait_until_ready`).

    Docker reports nothing of a container while it connects it to a network, which may take long.

    Raises:
        GpuhubError: The container has ended.
        NodeSilent: Docker has reported nothing of it for two minutes.
    """
    loop = asyncio.get_running_loop()
    told_at = loop.time()

    async def check_running() -> None:
        nonlocal told_at
        try:
            await _check_running(daemons, node, container)
        except NodeSilent:
            if loop.time() - told_at > _SILENCE_S:
                raise
        else:
            told_at = loop.time()

    await wait_until_ready(url, check_running, tls=tls)


async def wait_until_ready(
    url: str, check_running: Callable[[], Awaitable[None]], *, tls: ssl.SSLContext | None = None
) -> None:
    """Return as soon as the notebook at `url` (its `/api`) answers.

    An answer without JupyterHub's version header comes from another program on the way and does not count.

    Args:
        check_running: Called at intervals; raises when the notebook has ended.
    """
    await _poll(url, lambda headers: _VERSION_HEADER in headers, check_running, period_s=_CHECK_PERIOD_S, tls=tls)


async def _poll(
    url: str,
    is_expected: Callable[[httpx.Headers], bool],
    check_running: Callable[[], Awaitable[None]],
    *,
    period_s: float,
    tls: ssl.SSLContext | None,
) -> httpx.Headers:
    """Return the headers of the first answer that is expected; call `check_running` every `period_s` until then."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    next_check = begun + period_s
    limits = httpx.Limits(max_keepalive_connections=0)
    _begun.append(begun)
    try:
        async with httpx.AsyncHTTPTransport(trust_env=False, verify=tls or True, limits=limits) as transport:
            while True:
                headers = await _read_headers(transport, url)
                if headers is not None and is_expected(headers):
                    return headers
                if loop.time() > next_check:
                    await check_running()
                    next_check = loop.time() + period_s
                now = loop.time()
                await asyncio.sleep(choose_period(now - begun, [now - other for other in _begun]))
    finally:
        _begun.remove(begun)


def choose_period(age_s: float, ages_s: Sequence[float]) -> float:
    """Return the seconds until the next attempt of a wait of this age; young ones share the hub's attempts.

    Args:
        ages_s: The ages of all waits in progress, this one's too.
    """
    if age_s >= _LATER_S:
        return _LATER_PERIOD_S
    return min(_ATTEMPT_PERIOD_S * sum(other_s < _LATER_S for other_s in ages_s), _LONGEST_PERIOD_S)


async def _read_headers(transport: httpx.AsyncHTTPTransport, url: str) -> httpx.Headers | None:
    """Return the headers of an answer, without its body; None if there is no answer, or one of a failing server."""
    # Not a client of httpx, which keeps cookies and examines redirects.
    request = httpx.Request("GET", url, headers={"Accept-Encoding": "identity"})
    try:
        async with asyncio.timeout(_ATTEMPT_TIMEOUT_S):
            response = await transport.handle_async_request(request)
            await response.aclose()
    except (httpx.TransportError, TimeoutError):
        return None
    return response.headers if response.status_code < 500 else None


async def _check_running(daemons: DockerClients, node: str, container: str) -> None:
    description = await inspect_container(daemons, node, container)
    if description is None:
        raise GpuhubError("The notebook's container was removed while it started.")
    state = description["State"]
    if not state["Running"]:
        raise GpuhubError(describe_end(state))


def describe_end(state: dict[str, object]) -> str:
    """Return why a container that should run has ended, for the user."""
    if state.get("OOMKilled"):
        return "The notebook ran out of memory while it started: choose a profile with more."
    return f"The notebook ended while it started (exit code {state.get('ExitCode')}); its log is in the hub's log."


async def read_log_tail(daemons: DockerClients, node: str, container: str) -> str:
    """Return the last lines of a container's output."""
    output: bytes = await daemons.call(node, "logs", container, tail=40)
    return output.decode("utf-8", "replace")


async def activate_granted(broker: LeaseBroker, lease_id: str, container_id: str) -> None:
    """Activate a lease that is still granted because the hub died between creating the container and reporting it.

    Raises:
        GpuhubError: The broker does not answer or refuses.
    """
    lease = await broker.get_lease(lease_id)
    if lease.state is LeaseState.GRANTED:
        await broker.activate(lease_id, container_id)


def limit_wait_up(server: Any, has_ended: Callable[[], Awaitable[bool]]) -> None:
    """Replace `server.wait_up` (of a `jupyterhub.objects.Server`) by a wait that reads headers alone.

    It raises TimeoutError when there is no answer in time or `has_ended` returns True, and no other error, whatever the
    notebook answers.
    """

    async def check_running() -> None:
        if await has_ended():
            raise TimeoutError("its container has ended")

    async def wait(
        *,
        timeout: float,  # noqa: ASYNC109 - JupyterHub names it
        ssl_context: ssl.SSLContext | None = None,
        extra_path: str = "",
        **_others: Any,
    ) -> SimpleNamespace:
        url = url_path_join(server.url, extra_path)
        async with asyncio.timeout(timeout):
            headers = await _poll(
                url, lambda _headers: True, check_running, period_s=RECOVERY_CHECK_PERIOD_S, tls=ssl_context
            )
        version = headers.get(_VERSION_HEADER)
        return SimpleNamespace(headers={_VERSION_HEADER: version} if _is_version(version) else {})

    server.wait_up = wait


def _is_version(text: str | None) -> bool:
    if text is None or len(text) > _MAX_VERSION:
        return False
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True
