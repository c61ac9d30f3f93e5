"""The ledger: the only writer of leases and jobs, and the snapshot that readers see.

A change is a pure function that edits a transaction. Changes that arrive while one is being written are gathered: each
edits the same transaction in turn, and a change that raises is rolled back alone. The transaction hook then adds
effects (jobs follow their leases, the queue is served); all is written to the store at once, and only then visible to
others. Readers never wait. A change costs what it touches, apart from a plain copy of two dicts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from gpuhub.broker.db.store import Store
from gpuhub.broker.db.writer import Changes
from gpuhub.broker.state.transaction import RowIndex, Transaction
from gpuhub.common.errors import GpuhubError, Unavailable
from gpuhub.domain.clock import Clock
from gpuhub.domain.models import JobRow, LeaseRow, LedgerSnapshot

T = TypeVar("T")
R = TypeVar("R", LeaseRow, JobRow)
log = logging.getLogger(__name__)


#: Number of leases, and of jobs, that are kept in memory after their end, most of which their clients still ask about.
MAX_ENDED = 2048


class EndedRows(Generic[R]):
    """Leases or jobs that ended last, as they are stored; they never change again."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, R] = OrderedDict()

    def get(self, row_id: str) -> R | None:
        """Return a row; None if it has not ended, or is known to the store alone."""
        return self._rows.get(row_id)

    def add(self, rows: Iterable[R]) -> None:
        """Add rows, and drop the oldest above `MAX_ENDED`."""
        self._rows.update((row.id, row) for row in rows)
        while len(self._rows) > MAX_ENDED:
            self._rows.popitem(last=False)

    def clear(self) -> None:
        """Drop all rows, because the store may delete some."""
        self._rows.clear()


class TransactionHook(Protocol):
    """Takes part in each transaction of the ledger."""

    async def before(self, snapshot: LedgerSnapshot) -> None:
        """Prepare for a transaction that starts from `snapshot`.

        Raises:
            Unavailable: Nothing can be changed at the moment.
        """
        ...

    def commit(self, transaction: Transaction) -> None:
        """Add the effects of the edits, and serve the queue; the transaction is stored afterwards."""
        ...

    def rollback(self) -> None:
        """Discard what `commit` did: the transaction was not stored."""
        ...


@dataclass(frozen=True, slots=True)
class _PendingEdit:
    """A change and the future that its caller waits for."""

    edit: Callable[[Transaction], Any]
    future: asyncio.Future[Any]


class Ledger:
    """The current snapshot, and the changes to it."""

    def __init__(self, store: Store, hook: TransactionHook, clock: Clock) -> None:
        self._store = store
        self._hook = hook
        self._clock = clock
        self._pending: list[_PendingEdit] = []
        self._writer: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._watched: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        leases, jobs = store.load_open()
        self._seq, version = store.find_highest()
        # Queue positions are not stored, so versions seen before a restart can be above the highest stored one.
        self._version = max(version, int(clock.now() * 1000))
        self.snapshot = LedgerSnapshot(leases={row.id: row for row in leases}, jobs={row.id: row for row in jobs})
        self.ended_leases: EndedRows[LeaseRow] = EndedRows()
        self.ended_jobs: EndedRows[JobRow] = EndedRows()
        #: Called with all changes after they were stored; they must not raise.
        self.observers: list[Callable[[Changes], None]] = []
        self.index = RowIndex()
        for lease in leases:
            self.index.replace_lease(None, lease)
        for job in jobs:
            self.index.replace_job(None, job)

    def find_leases(self, *tag: str | int) -> list[LeaseRow]:
        """Return the open leases with a tag of the index, such as `("owner", name)`, in any order.

        While a transaction is being written, the index is ahead of the snapshot: new leases are not included yet.
        """
        rows = self.snapshot.leases
        return [rows[lease_id] for lease_id in self.index.find(*tag) if lease_id in rows]

    def find_jobs(self, *tag: str | int) -> list[JobRow]:
        """Return the open jobs with a tag of the index, likewise."""
        rows = self.snapshot.jobs
        return [rows[job_id] for job_id in self.index.find(*tag) if job_id in rows]

    def leases_on(self, node: str) -> list[LeaseRow]:
        """Return the open leases that have, or will have, containers on a node, by id."""
        return sorted(self.find_leases("node", node), key=lambda lease: lease.id)

    # -- waiting for changes --------------------------------------------------------------------------------------

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change. Take it before reading the snapshot, so that no change is missed."""
        return self._changed

    def watch(self, key: str) -> asyncio.Event:
        """Return an event set at the next change of a lease or job (by id), or of a lease on a node (`node:` and its
        name).
        """
        event = self._watched.get(key)
        if event is None:
            event = self._watched[key] = asyncio.Event()
        return event

    def notify_all(self) -> None:
        """Wake all waiters for any change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def notify_watchers(self, key: str) -> None:
        """Wake the waiters for one key."""
        event = self._watched.pop(key, None)
        if event is not None:
            event.set()

    def notify_observers(self, changes: Changes) -> None:
        """Pass changes to all observers."""
        for observe in self.observers:
            observe(changes)

    # -- changes --------------------------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        """True while a transaction is committed in memory but not visible: the scheduler is ahead of the snapshot."""
        return self._writer is not None

    def next_version(self) -> int:
        """Return a number above all earlier versions."""
        self._version += 1
        return self._version

    async def change(self, edit: Callable[[Transaction], T]) -> T:
        """Run `edit` in a transaction, store it and publish it; nothing has changed if this raises.

        A caller that is cancelled does not cancel the change: the stored state is always the published state.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._pending.append(_PendingEdit(edit, answer))
        if self._writer is None:
            self._writer = asyncio.ensure_future(self._process_pending())
        return await asyncio.shield(answer)

    async def close(self) -> None:
        """Wait until the current change is written."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    async def _process_pending(self) -> None:
        try:
            while self._pending:
                pending, self._pending = self._pending, []
                await self._commit_batch(pending)
        finally:
            self._writer = None

    async def _commit_batch(self, pending: list[_PendingEdit]) -> None:
        try:
            await self._commit(pending)
        except Unavailable as error:
            _reject_all(pending, error)
        except Exception as error:
            if len(pending) == 1:
                if not isinstance(error, GpuhubError):
                    log.exception("a change of the ledger failed unexpectedly")
                _reject_all(pending, error)
                return
            # One of the changes cannot be written: the others must not fail with it.
            for edit in pending:
                await self._commit_batch([edit])

    async def _commit(self, pending: list[_PendingEdit]) -> None:
        await self._hook.before(self.snapshot)
        transaction = Transaction(self.snapshot, self.index, self._clock.now(), self._seq)
        start = transaction.savepoint()
        results = [(edit, *_run_edit(transaction, edit.edit)) for edit in pending]
        try:
            self._hook.commit(transaction)
            changes = transaction.assign_version(self.next_version())
            if changes:
                await asyncio.to_thread(self._store.save, changes)
        except BaseException:
            transaction.rollback_to(start)
            self._hook.rollback()
            raise
        self._publish(transaction, changes)
        for edit, value, error in results:
            _resolve(edit, value, error)

    def _publish(self, transaction: Transaction, changes: Changes) -> None:
        self._seq = transaction.seq
        if changes.leases or changes.jobs:
            self.snapshot = transaction.build_snapshot(changes)
            self.ended_leases.add(lease for _, lease in changes.leases if not lease.is_open)
            self.ended_jobs.add(job for _, job in changes.jobs if not job.is_open)
        for call in transaction.on_commit:
            call()
        self.notify_observers(changes)
        if changes.leases or changes.jobs:
            self._notify_changed(changes)
            self.notify_all()

    def _notify_changed(self, changes: Changes) -> None:
        keys = {job.id for _, job in changes.jobs}
        for _, lease in changes.leases:
            keys.add(lease.id)
            keys.update(f"node:{node}" for node in lease.nodes)
            keys.update(self.index.find("job of lease", lease.id))
        for key in keys:
            self.notify_watchers(key)


def _run_edit(transaction: Transaction, edit: Callable[[Transaction], Any]) -> tuple[Any, Exception | None]:
    savepoint = transaction.savepoint()
    try:
        return edit(transaction), None
    except Exception as error:  # noqa: BLE001 - whatever it is, it concerns its caller alone
        transaction.rollback_to(savepoint)
        return None, error


def _resolve(edit: _PendingEdit, value: Any, error: Exception | None) -> None:
    if edit.future.done():
        return
    if error is None:
        edit.future.set_result(value)
    else:
        edit.future.set_exception(error)


def _reject_all(pending: list[_PendingEdit], error: Exception) -> None:
    for edit in pending:
        _resolve(edit, None, error)
