"""What a restarted hub does with notebooks that it finds: it makes their leases whole, and waits only while they run.

JupyterHub waits for a restored notebook to answer without asking whether it still runs. The wait has to be long (its
node may be away for days), so a container that ends meanwhile would leave a server that can be neither used nor
stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from gpuhub.broker.schemas import LeaseState
from gpuhub.containers.leasing import Broker

#: Between two looks at a notebook that is waited for, seconds.
PERIOD_S = 3.0


async def activate_granted(broker: Broker, lease_id: str, container_id: str) -> None:
    """A hub that died between creating a container and saying so left its lease granted.

    Raises:
        GpuhubError: the broker does not answer, or refuses.
    """
    lease = await broker.get_lease(lease_id)
    if lease.state is LeaseState.GRANTED:
        await broker.activate(lease_id, container_id)


def wait_only_while(server: Any, is_over: Callable[[], Awaitable[bool]]) -> None:
    """Let `server.wait_up` (a `jupyterhub.objects.Server`) raise TimeoutError as soon as `is_over` says so."""
    wait_up = server.wait_up

    async def wait(**arguments: Any) -> Any:
        up = asyncio.ensure_future(wait_up(**arguments))
        over = asyncio.ensure_future(_until(is_over))
        try:
            await asyncio.wait({up, over}, return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                return up.result()
            raise TimeoutError("its container has ended")
        finally:
            for task in (up, over):
                task.cancel()
            await asyncio.gather(up, over, return_exceptions=True)

    server.wait_up = wait


async def _until(is_over: Callable[[], Awaitable[bool]]) -> None:
    while not await is_over():  # noqa: ASYNC110 - Docker tells nobody by an event that survives a cut
        await asyncio.sleep(PERIOD_S)
