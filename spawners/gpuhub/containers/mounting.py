"""Telling a daemon that hangs from a mount that does: a dead file server is no dead node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gpuhub.containers.daemons import Daemons
from gpuhub.errors import GpuhubError, NodeSilent, StorageUnavailable
from gpuhub.settings import Storage
from gpuhub.storage.faults import describe_hang, explain_mount

#: A daemon that is well answers `/_ping` in milliseconds.
_PING_S = 5.0


@asynccontextmanager
async def telling_storage(daemons: Daemons, node: str, storage: Storage, owner: str) -> AsyncIterator[None]:
    """Around what creates and starts an owner's container: where storage is why it fails, the error says so.

    Raises:
        StorageUnavailable: instead of what the daemon said, or did not say. What was made of the container stays.
    """
    try:
        yield
    except NodeSilent as error:
        if await _answers(daemons, node):
            raise StorageUnavailable(describe_hang(node, storage, owner)) from error
        raise
    except GpuhubError as error:
        explained = explain_mount(str(error), node, storage, owner)
        if explained is None:
            raise
        raise StorageUnavailable(explained) from error


async def _answers(daemons: Daemons, node: str) -> bool:
    try:
        async with asyncio.timeout(_PING_S):
            return bool(await daemons.call(node, "ping"))
    except (GpuhubError, TimeoutError):
        return False
