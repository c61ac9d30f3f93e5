"""The one way to change leases and jobs, and what everybody sees of them.

A change is made on a draft by a pure function. Changes that come while one is being written are gathered: each is made
on the same draft in turn, and one that raises is undone alone. Then what follows is settled (jobs follow their leases,
the queue is served), written in one transaction, and only then seen by others. Readers never wait. What a change costs
depends on what it touches, a plain copy of two dicts aside.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from gpuhub.broker.clock import Clock
from gpuhub.broker.drafts import Draft, Snapshot
from gpuhub.broker.index import Index
from gpuhub.broker.store import Store
from gpuhub.broker.writing import Changes
from gpuhub.errors import GpuhubError, Unavailable

__all__ = ["Consequences", "Draft", "Ledger", "Snapshot"]

T = TypeVar("T")
log = logging.getLogger(__name__)


class Consequences(Protocol):
    """What follows from changes."""

    async def prepare(self, snapshot: Snapshot) -> None:
        """Get ready for `settle`; `snapshot` is what drafts are made from.

        Raises:
            Unavailable: nothing can be changed at present.
        """
        ...

    def settle(self, draft: Draft) -> None:
        """Make a draft consistent and serve the queue."""
        ...

    def abandon(self) -> None:
        """The settled draft will not be: everything is as it was before."""
        ...


@dataclass(frozen=True, slots=True)
class _Asked:
    """A change that somebody waits for."""

    edit: Callable[[Draft], Any]
    answer: asyncio.Future[Any]


class Ledger:
    """Holder of the current snapshot."""

    def __init__(self, store: Store, consequences: Consequences, clock: Clock) -> None:
        self._store = store
        self._consequences = consequences
        self._clock = clock
        self._asked: list[_Asked] = []
        self._writer: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._watched: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        leases, jobs = store.load()
        self._seq, version = store.highest()
        # Places are not stored, so versions seen before a restart may be above the highest stored one.
        self._version = max(version, int(clock.now() * 1000))
        self.snapshot = Snapshot(leases={row.id: row for row in leases}, jobs={row.id: row for row in jobs})
        self.index = Index()
        for lease in leases:
            self.index.replace_lease(None, lease)
        for job in jobs:
            self.index.replace_job(None, job)

    # -- waiting for changes --------------------------------------------------------------------------------------

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change. Take it before looking at the snapshot, so that no change is missed."""
        return self._changed

    def watch(self, what: str) -> asyncio.Event:
        """Set at the next change of one lease or job (by id), or of a lease on a node (`node:` and its name)."""
        found = self._watched.get(what)
        if found is None:
            found = self._watched[what] = asyncio.Event()
        return found

    def wake(self) -> None:
        """Let everybody who waits for any change look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def wake_watchers(self, what: str) -> None:
        """Let those look again who watch this."""
        found = self._watched.pop(what, None)
        if found is not None:
            found.set()

    # -- changing -------------------------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        """A change is settled and not yet seen: who was told of consequences is ahead of the snapshot."""
        return self._writer is not None

    def take_version(self) -> int:
        """A number above all that were ever given."""
        self._version += 1
        return self._version

    async def change(self, edit: Callable[[Draft], T]) -> T:
        """Run `edit` on a draft, settle it, store it, show it. Nothing happened when this raises.

        A caller that is cancelled does not cancel the change: what is stored is always what is shown.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._asked.append(_Asked(edit, answer))
        if self._writer is None:
            self._writer = asyncio.ensure_future(self._write_all())
        return await asyncio.shield(answer)

    async def close(self) -> None:
        """Let a change end that is being written."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    async def _write_all(self) -> None:
        try:
            while self._asked:
                asked, self._asked = self._asked, []
                await self._write(asked)
        finally:
            self._writer = None

    async def _write(self, asked: list[_Asked]) -> None:
        try:
            await self._try(asked)
        except Unavailable as error:
            _refuse(asked, error)
        except Exception as error:
            if len(asked) == 1:
                if not isinstance(error, GpuhubError):
                    log.exception("a change of the ledger failed unexpectedly")
                _refuse(asked, error)
                return
            # One of them cannot be written: the others shall not fail with it.
            for one in asked:
                await self._write([one])

    async def _try(self, asked: list[_Asked]) -> None:
        await self._consequences.prepare(self.snapshot)
        draft = Draft(self.snapshot, self.index, self._clock.now(), self._seq)
        start = draft.mark()
        answers = [(one, *_edit(draft, one.edit)) for one in asked]
        try:
            self._consequences.settle(draft)
            changes = draft.stamp(self.take_version())
            if changes:
                await asyncio.to_thread(self._store.save, changes)
        except BaseException:
            draft.undo(start)
            self._consequences.abandon()
            raise
        self._show(draft, changes)
        for one, value, error in answers:
            _answer(one, value, error)

    def _show(self, draft: Draft, changes: Changes) -> None:
        self._seq = draft.seq
        if changes.leases or changes.jobs:
            self.snapshot = draft.close(changes)
        for call in draft.after:
            call()
        if changes.leases or changes.jobs:
            self._wake_touched(changes)
            self.wake()

    def _wake_touched(self, changes: Changes) -> None:
        touched = {job.id for _, job in changes.jobs}
        for _, lease in changes.leases:
            touched.add(lease.id)
            touched.update(f"node:{node}" for node in lease.nodes)
            touched.update(self.index.find("job of lease", lease.id))
        for what in touched:
            self.wake_watchers(what)


def _edit(draft: Draft, edit: Callable[[Draft], Any]) -> tuple[Any, Exception | None]:
    mark = draft.mark()
    try:
        return edit(draft), None
    except Exception as error:  # noqa: BLE001 - whatever it is, it is its caller's, and nobody else's
        draft.undo(mark)
        return None, error


def _answer(one: _Asked, value: Any, error: Exception | None) -> None:
    if one.answer.done():
        return
    if error is None:
        one.answer.set_result(value)
    else:
        one.answer.set_exception(error)


def _refuse(asked: list[_Asked], error: Exception) -> None:
    for one in asked:
        _answer(one, None, error)
