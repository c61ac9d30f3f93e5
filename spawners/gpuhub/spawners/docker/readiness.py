"""Waits until a notebook server answers, or fails when it ends instead."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

import httpx

from gpuhub.common.errors import GpuhubError
from gpuhub.docker.client import DockerClients
from gpuhub.docker.container_lifecycle import inspect_container

#: Time between two attempts, seconds. JupyterHub's own wait backs off to seconds, which delays the start.
_POLL_PERIOD_S = 0.025
_CHECK_PERIOD_S = 1.0
_VERSION_HEADER = "X-JupyterHub-Version"


async def wait_container_ready(
    daemons: DockerClients, node: str, container: str, url: str, *, tls: ssl.SSLContext | None = None
) -> None:
    """Return as soon as the notebook in a container answers (see `wait_until_ready`).

    Raises:
        GpuhubError: The container has ended.
    """
    await wait_until_ready(url, lambda: _check_running(daemons, node, container), tls=tls)


async def wait_until_ready(
    url: str, check_running: Callable[[], Awaitable[None]], *, tls: ssl.SSLContext | None = None
) -> None:
    """Return as soon as the notebook at `url` (its `/api`) answers.

    An answer without JupyterHub's version header comes from another program on the way and does not count.

    Args:
        check_running: Called at intervals; raises when the notebook has ended.
    """
    loop = asyncio.get_running_loop()
    next_check = loop.time() + _CHECK_PERIOD_S
    async with httpx.AsyncClient(trust_env=False, timeout=2.0, verify=tls or True) as client:
        while not await _is_answering(client, url):
            if loop.time() > next_check:
                await check_running()
                next_check = loop.time() + _CHECK_PERIOD_S
            await asyncio.sleep(_POLL_PERIOD_S)


async def _is_answering(client: httpx.AsyncClient, url: str) -> bool:
    try:
        response = await client.get(url)
    except httpx.TransportError:
        return False
    return response.status_code < 500 and _VERSION_HEADER in response.headers


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
