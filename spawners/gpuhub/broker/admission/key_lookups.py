"""Lookups of leases by the keys of their requests: those that come while one query runs share the next one."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from gpuhub.broker.db.store import Store
from gpuhub.domain.models import LeaseRow

#: An owner and a key.
_Key = tuple[str, str]


class KeyLookups:
    """Finds leases by owner and key in the store, with one query at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._wanted: defaultdict[_Key, list[asyncio.Future[LeaseRow | None]]] = defaultdict(list)
        self._reader: asyncio.Task[None] | None = None

    async def find(self, owner: str, key: str) -> LeaseRow | None:
        """Return the lease that the owner requested with this key, ended or not.

        Raises:
            Unavailable: the store cannot be read.
        """
        answer: asyncio.Future[LeaseRow | None] = asyncio.get_running_loop().create_future()
        self._wanted[owner, key].append(answer)
        if self._reader is None:
            self._reader = asyncio.ensure_future(self._read_all())
        return await answer

    async def _read_all(self) -> None:
        try:
            while self._wanted:
                wanted, self._wanted = self._wanted, defaultdict(list)
                await self._read(wanted)
        finally:
            self._reader = None

    async def _read(self, wanted: defaultdict[_Key, list[asyncio.Future[LeaseRow | None]]]) -> None:
        answers = [(key, answer) for key, asked in wanted.items() for answer in asked]
        try:
            found = await asyncio.to_thread(self._store.find_leases_by_key, list(wanted))
        except Exception as error:  # noqa: BLE001 - whatever it is, each caller gets it
            for _, answer in answers:
                if not answer.done():
                    answer.set_exception(error)
            return
        for key, answer in answers:
            if not answer.done():
                answer.set_result(found.get(key))
