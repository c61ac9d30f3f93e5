"""Before a container is made: who its user is, whether the file servers answer, and the home. No step holds up the
event loop, and none takes longer than `patience`, whatever hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from gpuhub.identity import Identity, find_identity
from gpuhub.settings import Storage, Users
from gpuhub.storage.homes import ensure_home, place_of
from gpuhub.storage.patience import Patience
from gpuhub.storage.probe import Prober, servers_of

#: Of the whole process: what is stuck is stuck for everybody.
PATIENCE = Patience()
PROBER = Prober(PATIENCE)
_ACCOUNTS = "accounts"


async def look_up(users: Users, storage: Storage, state: Path, name: str) -> Identity:
    """Who a user is.

    Raises:
        StorageUnavailable: the accounts do not answer within `storage.patience`.
        InvalidRequest, NotAllowed, SetupError: see `find_identity`.
    """
    return await PATIENCE.run(
        _ACCOUNTS,
        lambda: find_identity(users, state, name),
        limit_s=storage.patience,
        silent="The head node's accounts (files, LDAP) do not answer",
    )


async def prepare_user(users: Users, storage: Storage, state: Path, name: str, *, datasets: bool = True) -> Identity:
    """The user's identity, once their home is there and its file server answers; `datasets`: theirs too.

    Raises:
        StorageUnavailable: something does not answer within `storage.patience`; the text names it.
        InvalidRequest, NotAllowed, SetupError: what stands in the way otherwise, see `find_identity` and `ensure_home`.
    """
    places = (storage.home, storage.datasets) if datasets else (storage.home,)
    servers = servers_of(places, storage.nfs_options)
    waits: list[Awaitable[Any]] = [
        look_up(users, storage, state, name),
        *(PROBER.ensure_answers(one, storage.patience) for one in servers),
    ]
    tasks = [asyncio.ensure_future(one) for one in waits]
    try:
        identity, *_ = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    # Not before the servers answered: a home on one of them would hang.
    place = place_of(storage, name)
    if place is not None:
        await PATIENCE.run(
            str(place.root),
            lambda: ensure_home(storage, identity),
            limit_s=storage.patience,
            silent=f"The folder of homes {place.root} on the head node does not answer",
        )
    found: Identity = identity
    return found
