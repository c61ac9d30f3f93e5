"""Waiting for a notebook server to answer, and noticing when it ends instead."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

import httpx

from gpuhub.containers.creation import inspect
from gpuhub.containers.daemons import Daemons
from gpuhub.errors import GpuhubError

#: JupyterHub's own wait backs off for up to seconds; this one costs at most this much.
_PERIOD_S = 0.025
_LOOK_EVERY_S = 1.0
_VERSION_HEADER = "X-JupyterHub-Version"


async def wait_ready(
    daemons: Daemons, node: str, container: str, url: str, *, tls: ssl.SSLContext | None = None
) -> None:
    """Return as soon as the notebook in a container answers, see `wait_answer`.

    Raises:
        GpuhubError: the container has ended.
    """
    await wait_answer(url, lambda: _refuse_ended(daemons, node, container), tls=tls)


async def wait_answer(
    url: str, refuse_ended: Callable[[], Awaitable[None]], *, tls: ssl.SSLContext | None = None
) -> None:
    """Return as soon as the notebook at `url` (its `/api`) answers itself; `refuse_ended`, called now and then, raises
    when it never will.

    An answer without JupyterHub's version header comes from something else on the way, and does not count.
    """
    loop = asyncio.get_running_loop()
    next_look = loop.time() + _LOOK_EVERY_S
    async with httpx.AsyncClient(trust_env=False, timeout=2.0, verify=tls or True) as client:
        while not await _answers(client, url):
            if loop.time() > next_look:
                await refuse_ended()
                next_look = loop.time() + _LOOK_EVERY_S
            await asyncio.sleep(_PERIOD_S)


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        response = await client.get(url)
    except httpx.TransportError:
        return False
    return response.status_code < 500 and _VERSION_HEADER in response.headers


async def _refuse_ended(daemons: Daemons, node: str, container: str) -> None:
    found = await inspect(daemons, node, container)
    if found is None:
        raise GpuhubError("The notebook's container was removed while it started.")
    state = found["State"]
    if not state["Running"]:
        raise GpuhubError(describe_end(state))


def describe_end(state: dict[str, object]) -> str:
    """For a person: why a container that should run does not."""
    if state.get("OOMKilled"):
        return "The notebook ran out of memory while it started: choose a profile with more."
    return f"The notebook ended while it started (exit code {state.get('ExitCode')}); its log is in the hub's log."


async def read_log(daemons: Daemons, node: str, container: str) -> str:
    """The end of a container's output, for the hub's log."""
    output: bytes = await daemons.call(node, "logs", container, tail=40)
    return output.decode("utf-8", "replace")
