"""Waits for the answer of a notebook server: at its start, and after a restart of the hub.

JupyterHub waits for a restored notebook to answer without checking whether it still runs. The wait must be long (its
node may be unreachable for days), so a container that ends in the meantime would leave a server that can be neither
used nor stopped.

The program that answers belongs to the user, and its answer must not keep the hub from starting: JupyterHub fails on
any error except a timeout, and on an invalid version.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
from packaging.version import InvalidVersion, Version

from gpuhub.broker_api.schemas import LeaseState
from gpuhub.common.errors import GpuhubError
from gpuhub.docker.client import DockerClients
from gpuhub.docker.container_lifecycle import inspect_container
from gpuhub.spawners.notebook_lease import LeaseBroker

#: Time between two attempts at a start, seconds. JupyterHub's own wait backs off to seconds, which delays the start.
_ATTEMPT_PERIOD_S = 0.025
#: Time between two checks whether a notebook still runs, seconds: at a start, and after a restart of the hub.
_CHECK_PERIOD_S = 1.0
RECOVERY_CHECK_PERIOD_S = 3.0
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
            await asyncio.sleep(_ATTEMPT_PERIOD_S)


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


async def activate_granted(broker: LeaseBroker, lease_id: str, container_id: str) -> None:
    """Activate a lease that is still granted because the hub died between creating the container and reporting it.

    Raises:
        GpuhubError: The broker does not answer or refuses.
    """
    lease = await broker.get_lease(lease_id)
    if lease.state is LeaseState.GRANTED:
        await broker.activate(lease_id, container_id)


def limit_wait_up(server: Any, has_ended: Callable[[], Awaitable[bool]]) -> None:
    """Make `server.wait_up` (of a `jupyterhub.objects.Server`) raise TimeoutError once `has_ended` returns True.

    Whatever the notebook answers, `wait_up` raises no other error.
    """
    wait_up = server.wait_up

    async def wait(**arguments: Any) -> Any:
        up = asyncio.ensure_future(wait_up(**arguments))
        over = asyncio.ensure_future(_wait_until(has_ended))
        try:
            await asyncio.wait({up, over}, return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                return _drop_invalid_version(_read_result(up))
            raise TimeoutError("its container has ended")
        finally:
            for task in (up, over):
                task.cancel()
            await asyncio.gather(up, over, return_exceptions=True)

    server.wait_up = wait


def _read_result(up: asyncio.Future[Any]) -> Any:
    try:
        return up.result()
    except TimeoutError:
        raise
    except Exception as error:
        raise TimeoutError(f"its notebook gave an invalid answer: {error!r}") from error


def _drop_invalid_version(answer: Any) -> Any:
    """Return the part of the answer that JupyterHub reads, without an invalid version."""
    try:
        Version(answer.headers.get(_VERSION_HEADER, "0"))
    except InvalidVersion:
        return SimpleNamespace(headers={})
    return answer


async def _wait_until(has_ended: Callable[[], Awaitable[bool]]) -> None:
    while not await has_ended():  # noqa: ASYNC110 - Docker has no event that survives a lost connection
        await asyncio.sleep(RECOVERY_CHECK_PERIOD_S)
