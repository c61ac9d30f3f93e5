"""Prepares a user before a container is created: identity, reachable file servers and the home.

No step blocks the event loop, and each ends after `storage.patience` seconds even if a file server hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from gpuhub.config.identity import UserIdentity, find_identity
from gpuhub.config.settings import StorageSettings, UserSettings
from gpuhub.storage.blocking_calls import BlockingCallPool
from gpuhub.storage.homes import ensure_home, find_home
from gpuhub.storage.probe import NfsProber, find_servers

#: Shared by the whole process, because a target that hangs does so for all users.
BLOCKING_CALLS = BlockingCallPool()
PROBER = NfsProber(BLOCKING_CALLS)
_ACCOUNTS_TARGET = "accounts"


async def resolve_identity(users: UserSettings, storage: StorageSettings, state: Path, name: str) -> UserIdentity:
    """Return a user's identity.

    Raises:
        StorageUnavailable: The accounts do not answer within `storage.patience`.
        InvalidRequest, NotAllowed, SetupError: As for `find_identity`.
    """
    return await BLOCKING_CALLS.run(
        _ACCOUNTS_TARGET,
        lambda: find_identity(users, state, name),
        limit_s=storage.patience,
        timeout_message="The head node's accounts (files, LDAP) do not answer",
    )


async def prepare_user(
    users: UserSettings, storage: StorageSettings, state: Path, name: str, *, datasets: bool = True
) -> UserIdentity:
    """Return the user's identity once the home exists and its file server answers.

    Args:
        datasets: Whether the datasets' file server must answer as well.

    Raises:
        StorageUnavailable: A server or folder does not answer within `storage.patience`; the text names it.
        InvalidRequest, NotAllowed, SetupError: As for `find_identity` and `ensure_home`.
    """
    sources = (storage.home, storage.datasets) if datasets else (storage.home,)
    servers = find_servers(sources, storage.nfs_options)
    waits: list[Awaitable[Any]] = [
        resolve_identity(users, storage, state, name),
        *(PROBER.ensure_answers(server, storage.patience) for server in servers),
    ]
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        identity: UserIdentity
        identity, *_ = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    # Only once the servers have answered, because a home on one of them would hang.
    location = find_home(storage, name)
    if location is not None:
        await BLOCKING_CALLS.run(
            str(location.root),
            lambda: ensure_home(storage, identity),
            limit_s=storage.patience,
            timeout_message=f"The folder of homes {location.root} on the head node does not answer",
        )
    return identity
