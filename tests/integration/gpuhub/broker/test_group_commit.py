"""Changes that are written together, in a process that dies between their write and their answers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpuhub.broker.db import retention
from gpuhub.broker.db.store import Store
from gpuhub.broker.db.writer import Changes
from gpuhub.broker.state.ledger import Ledger
from gpuhub.broker.state.transaction import Transaction
from gpuhub.broker_api.schemas import Purpose
from gpuhub.domain.clock import Clock
from gpuhub.domain.models import LeaseRow, LedgerSnapshot, ResourceRequest
from tests.support.broker.in_process import until

ROOT = Path(__file__).parents[4]
#: Changes that come while the first one is being written.
TOGETHER = 40


class NoEffects:
    """A transaction hook that adds one event, so that a write ends with the removal of old events."""

    async def before(self, snapshot: LedgerSnapshot) -> None:
        return

    def commit(self, transaction: Transaction) -> None:
        transaction.add_event("test", "something changed")

    def rollback(self) -> None:
        return


class DyingStore(Store):
    """A store whose process dies in its second write: before the commit, or after it and before any answer."""

    moment: str
    writes = 0
    gate: threading.Event
    #: The first write's answer, which the second write could otherwise overtake.
    answered: threading.Event

    def save(self, changes: Changes) -> None:
        assert self.gate.wait(30)
        self.writes += 1
        assert self.writes == 1 or self.answered.wait(30)
        if self.writes == 2 and self.moment == "before the commit":
            retention.prune_events = lambda *_: _die()
        super().save(changes)
        if self.writes == 2:
            _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def change_and_die(url: str, lock: Path, moment: str) -> None:
    """Print the name of each lease whose change is answered, and die in the second write."""
    store = DyingStore.open(url, lock)
    store.moment, store.gate, store.answered = moment, threading.Event(), threading.Event()
    ledger = Ledger(store, NoEffects(), Clock())

    async def change(name: str) -> None:
        def edit(transaction: Transaction) -> LeaseRow:
            return transaction.put_lease(
                LeaseRow(
                    id=name, seq=transaction.next_seq(), key=name, owner="ada", purpose=Purpose.NOTEBOOK, subject=name,
                    profile="p", resources=ResourceRequest(), created_at=1.0, since=1.0,
                )
            )  # fmt: skip

        await ledger.change(edit)
        os.write(1, f"{name}\n".encode())
        store.answered.set()

    first = asyncio.ensure_future(change("first"))
    await until(lambda: ledger.is_writing and not ledger._pending, "the first is being written")
    others = [asyncio.ensure_future(change(f"l{number}")) for number in range(TOGETHER)]
    await asyncio.sleep(0)
    store.gate.set()
    await asyncio.gather(first, *others)


@pytest.mark.parametrize(("moment", "written"), [("before the commit", 1), ("after the commit", 1 + TOGETHER)])
def test_no_answer_precedes_the_write_that_covers_it(tmp_path: Path, moment: str, written: int) -> None:
    """Of changes that are written together, all or none are in the store, and nobody was told before."""
    check_death(f"sqlite:///{tmp_path}/broker.sqlite", tmp_path / "broker.lock", moment, written)


def check_death(url: str, lock: Path, moment: str, written: int) -> None:
    """Let a process die in its second write, and count what is in the store afterwards."""
    command = [sys.executable, "-m", "tests.integration.gpuhub.broker.test_group_commit", url, str(lock), moment]
    died = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert died.stdout.split() == ["first"]
    store = Store.open(url, lock)
    assert len(store.load_open()[0]) == written
    store.close()


if __name__ == "__main__":
    asyncio.run(change_and_die(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
