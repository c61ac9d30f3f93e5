"""Recovers notebooks after a restart of the hub: activates their leases, and limits the wait for their answer.

JupyterHub waits for a restored notebook to answer without checking whether it still runs. The wait must be long (its
node may be unreachable for days), so a container that ends in the meantime would leave a server that can be neither
used nor stopped.

The program that answers belongs to the user, and its answer must not keep the hub from starting: JupyterHub fails on
any error except a timeout, and on an invalid version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from packaging.version import InvalidVersion, Version

from gpuhub.broker_api.schemas import LeaseState
from gpuhub.spawners.notebook_lease import LeaseBroker

#: Time between two checks whether a notebook still runs, seconds.
POLL_PERIOD_S = 3.0
_VERSION_HEADER = "X-JupyterHub-Version"


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
        await asyncio.sleep(POLL_PERIOD_S)
