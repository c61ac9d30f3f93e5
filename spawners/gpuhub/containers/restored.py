"""What a restarted hub does with notebooks that it finds: it makes their leases whole, and waits only while they run.

JupyterHub waits for a restored notebook to answer without asking whether it still runs. The wait has to be long (its
node may be away for days), so a container that ends meanwhile would leave a server that can be neither used nor
stopped.

What answers there is the user's: nothing that it says may keep the hub from starting. JupyterHub gives up on anything
but silence, and on a version that is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from packaging.version import InvalidVersion, Version

from gpuhub.broker.schemas import LeaseState
from gpuhub.containers.leasing import Broker

#: Between two looks at a notebook that is waited for, seconds.
PERIOD_S = 3.0
_VERSION = "X-JupyterHub-Version"


async def activate_granted(broker: Broker, lease_id: str, container_id: str) -> None:
    """A hub that died between creating a container and saying so left its lease granted.

    Raises:
        GpuhubError: the broker does not answer, or refuses.
    """
    lease = await broker.get_lease(lease_id)
    if lease.state is LeaseState.GRANTED:
        await broker.activate(lease_id, container_id)


def wait_only_while(server: Any, is_over: Callable[[], Awaitable[bool]]) -> None:
    """Let `server.wait_up` (a `jupyterhub.objects.Server`) raise TimeoutError as soon as `is_over` says so, and nothing
    but TimeoutError whatever is answered.
    """
    wait_up = server.wait_up

    async def wait(**arguments: Any) -> Any:
        up = asyncio.ensure_future(wait_up(**arguments))
        over = asyncio.ensure_future(_until(is_over))
        try:
            await asyncio.wait({up, over}, return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                return _without_false_version(_result(up))
            raise TimeoutError("its container has ended")
        finally:
            for task in (up, over):
                task.cancel()
            await asyncio.gather(up, over, return_exceptions=True)

    server.wait_up = wait


def _result(up: asyncio.Future[Any]) -> Any:
    try:
        return up.result()
    except TimeoutError:
        raise
    except Exception as error:
        raise TimeoutError(f"its notebook answers, but not as one does: {error!r}") from error


def _without_false_version(answer: Any) -> Any:
    """What JupyterHub reads of the answer, without a version that is none."""
    try:
        Version(answer.headers.get(_VERSION, "0"))
    except InvalidVersion:
        return SimpleNamespace(headers={})
    return answer


async def _until(is_over: Callable[[], Awaitable[bool]]) -> None:
    while not await is_over():  # noqa: ASYNC110 - Docker tells nobody by an event that survives a cut
        await asyncio.sleep(PERIOD_S)
