"""Changes that come together, that fail, and that nobody waits for any more; on a real store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker.db.store import Store
from gpuhub.broker.db.writer import Changes
from gpuhub.broker.state.ledger import Ledger
from gpuhub.broker.state.transaction import Transaction
from gpuhub.broker_api.schemas import LeaseState, Purpose
from gpuhub.common.errors import Conflict, Unavailable
from gpuhub.common.gpu import GpuSpec
from gpuhub.domain import lease_states
from gpuhub.domain.clock import Clock
from gpuhub.domain.models import EventRow, LeaseRow, LedgerSnapshot, ResourceRequest
from gpuhub.scheduler.interface import GpuSlot, NodeAllocation
from tests.support.broker.calls import ask, read, run_notebook, wait_for_state
from tests.support.broker.in_process import Running, Setting, asgi_broker, until


class BlockingStore(Store):
    """A store whose writes wait while `is_held`, fail with `error`, and are counted."""

    is_held = False
    error: Exception | None = None
    saved: list[Changes]

    def save(self, changes: Changes) -> None:
        while self.is_held:
            threading.Event().wait(0.005)
        if self.error is not None:
            raise self.error
        super().save(changes)
        self.saved.append(changes)


class CountingHook:
    """A transaction hook without effects that counts its calls."""

    def __init__(self) -> None:
        self.transactions = 0
        self.rollbacks = 0
        self.more_effects: Callable[[Transaction], None] = lambda draft: None

    async def before(self, snapshot: LedgerSnapshot) -> None:
        self.transactions += 1

    def commit(self, draft: Transaction) -> None:
        self.more_effects(draft)

    def rollback(self) -> None:
        self.rollbacks += 1


class LedgerFixture:
    """A ledger on a real file."""

    def __init__(self, folder: Path) -> None:
        self.store = BlockingStore.open_file(folder / "broker.sqlite")
        self.store.saved = []
        self.hook = CountingHook()
        self.ledger = Ledger(self.store, self.hook, Clock())

    def add(self, name: str, owner: str = "ada") -> Callable[[Transaction], LeaseRow]:
        """An edit that asks for something."""

        def edit(draft: Transaction) -> LeaseRow:
            row = LeaseRow(
                id=name, seq=draft.next_seq(), key=name, owner=owner, purpose=Purpose.NOTEBOOK, subject=name,
                profile="p", resources=ResourceRequest(), created_at=1.0, since=1.0,
            )  # fmt: skip
            return draft.put_lease(row)

        return edit

    def list_lease_ids(self) -> list[str]:
        """What everybody sees, and what is stored: they are the same."""
        shown = sorted(self.ledger.snapshot.leases)
        assert shown == sorted(lease.id for lease in self.store.load_open()[0])
        assert shown == sorted(one for owner in ("ada", "ben") for one in self.ledger.index.find("owner", owner))
        return shown


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    made = LedgerFixture(tmp_path)
    yield made
    made.store.close()


async def change_together(bench: LedgerFixture, *edits: Callable[[Transaction], Any]) -> list[Any]:
    """The edits' results, all but the first made on one draft: they come while the first is being written."""
    bench.store.is_held = True
    tasks = [asyncio.ensure_future(bench.ledger.change(edits[0]))]
    await until(lambda: bench.ledger.is_writing and not bench.ledger._pending, "the first is being written")
    tasks += [asyncio.ensure_future(bench.ledger.change(edit)) for edit in edits[1:]]
    await asyncio.sleep(0)
    bench.store.is_held = False
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_concurrent_changes_share_one_transaction(bench: LedgerFixture) -> None:
    """Whoever comes while something is being written is written with the others who did, in their order."""
    rows = await change_together(bench, *(bench.add(f"l{number}") for number in range(5)))
    assert [row.id for row in rows] == ["l0", "l1", "l2", "l3", "l4"]
    assert [row.seq for row in rows] == [1, 2, 3, 4, 5]
    assert [len(changes.leases) for changes in bench.store.saved] == [1, 4]
    assert bench.list_lease_ids() == ["l0", "l1", "l2", "l3", "l4"]


async def test_failing_change_is_rolled_back_alone(bench: LedgerFixture) -> None:
    """Its caller hears of it; what it did before it raised is gone; the others' changes are kept."""

    def fail_halfway(draft: Transaction) -> None:
        bench.add("half")(draft)
        draft.put_lease(lease_states.release(draft.leases["l1"], "by mistake", 2.0))
        draft.add_event("lease.extended", "by mistake")
        raise Conflict("no")

    results = await change_together(bench, bench.add("l0"), bench.add("l1"), fail_halfway, bench.add("l2", "ben"))
    assert isinstance(results[2], Conflict)
    assert results[3].seq == 3
    assert bench.list_lease_ids() == ["l0", "l1", "l2"]
    assert bench.ledger.snapshot.leases["l1"].state is LeaseState.REQUESTED
    assert bench.store.list_events(after=None, limit=10) == []


async def test_cancelled_caller_does_not_cancel_the_change(bench: LedgerFixture) -> None:
    """What is stored is always what is shown."""
    bench.store.is_held = True
    task = asyncio.ensure_future(bench.ledger.change(bench.add("l0")))
    await until(lambda: bench.ledger.is_writing, "it is being written")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    bench.store.is_held = False
    await bench.ledger.change(bench.add("l1"))
    assert bench.list_lease_ids() == ["l0", "l1"]


async def test_failed_write_changes_nothing(bench: LedgerFixture) -> None:
    """Everybody of that transaction hears of it, nothing is changed, and the next change is as if it had not been."""
    await bench.ledger.change(bench.add("l0"))
    before = bench.ledger.snapshot
    bench.store.error = Unavailable("the disk is full")
    results = await change_together(bench, bench.add("l1"), bench.add("l2"), bench.add("l3"))
    assert [type(result) for result in results] == [Unavailable] * 3
    assert bench.ledger.snapshot is before
    assert bench.hook.rollbacks == 2
    bench.store.error = None
    assert (await bench.ledger.change(bench.add("l4"))).seq == 2
    assert bench.list_lease_ids() == ["l0", "l4"]


async def test_refused_row_does_not_fail_other_changes(bench: LedgerFixture, caplog: pytest.LogCaptureFixture) -> None:
    """A row that the tables refuse is refused alone, though it came together with others, and is no failure of ours."""

    def write_duplicate(draft: Transaction) -> None:
        row = bench.add("l9")(draft)
        draft.put_lease(row.evolve(id="l8", seq=draft.next_seq()))

    results = await change_together(bench, bench.add("l0"), bench.add("l1"), write_duplicate, bench.add("l2"))
    assert isinstance(results[2], Conflict)
    assert [type(result) for result in (results[1], results[3])] == [LeaseRow, LeaseRow]
    assert bench.list_lease_ids() == ["l0", "l1", "l2"]
    assert caplog.text == ""


async def test_readers_find_only_what_is_written(bench: LedgerFixture) -> None:
    """The index knows a new lease while it is being written; readers find it with the snapshot."""
    await bench.ledger.change(bench.add("l0"))
    bench.store.is_held = True
    task = asyncio.ensure_future(bench.ledger.change(bench.add("l1")))
    await until(lambda: bench.ledger.is_writing, "it is being written")
    assert sorted(bench.ledger.index.find("owner", "ada")) == ["l0", "l1"]
    assert [lease.id for lease in bench.ledger.find_leases("owner", "ada")] == ["l0"]
    bench.store.is_held = False
    await task
    assert {lease.id for lease in bench.ledger.find_leases("owner", "ada")} == {"l0", "l1"}


async def test_failing_transaction_hook_changes_nothing(bench: LedgerFixture, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the scheduler does wrong, what is shown stays what is stored."""

    def fail_hook(draft: Transaction) -> None:
        draft.put_lease(lease_states.release(draft.leases["l0"], "settled", 2.0))
        raise RuntimeError("the scheduler broke")

    await bench.ledger.change(bench.add("l0"))
    bench.hook.more_effects = fail_hook
    with pytest.raises(RuntimeError, match="the scheduler broke"):
        await bench.ledger.change(bench.add("l1"))
    assert (bench.list_lease_ids(), bench.hook.rollbacks) == (["l0"], 1)
    assert "failed unexpectedly" in caplog.text


async def test_only_watchers_of_a_lease_are_notified(bench: LedgerFixture) -> None:
    """By its id, or by the node that it is on; everybody who waits for any change is woken as well."""
    await bench.ledger.change(bench.add("l0"))
    await bench.ledger.change(bench.add("l1"))
    first, second, node, other_node, every = (
        bench.ledger.watch("l0"),
        bench.ledger.watch("l1"),
        bench.ledger.watch("node:rig1"),
        bench.ledger.watch("node:rig2"),
        bench.ledger.changed,
    )
    slot = GpuSlot(uuid="GPU-1", node="rig1", index=0, card=GpuSpec(model="RTX 5090", memory_mib=1))

    def grant(draft: Transaction) -> None:
        draft.put_lease(lease_states.grant(draft.leases["l1"], [NodeAllocation(node="rig1", slots=(slot,))], 2.0))

    await bench.ledger.change(grant)
    woken = [event.is_set() for event in (first, second, node, other_node, every)]
    assert woken == [False, True, True, False, True]


async def test_rows_that_ended_last_are_kept_in_memory(bench: LedgerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are equal to what is stored, and only a bounded number is kept."""
    monkeypatch.setattr("gpuhub.broker.state.ledger.MAX_ENDED", 2)
    names = [f"l{number}" for number in range(4)]
    for name in names:
        await bench.ledger.change(bench.add(name))
    assert [bench.ledger.ended_leases.get(name) for name in names] == [None] * 4
    for name in names:
        await bench.ledger.change(
            lambda draft, name=name: draft.put_lease(lease_states.release(draft.leases[name], "stopped", draft.now))
        )
    kept = [bench.ledger.ended_leases.get(name) for name in names]
    assert kept[:2] == [None, None]
    assert kept[2:] == [bench.store.get_lease(name) for name in names[2:]]
    bench.ledger.ended_leases.clear()
    assert bench.ledger.ended_leases.get("l3") is None


async def test_events_are_stored_with_their_change(bench: LedgerFixture) -> None:
    """And what is to be done afterwards is done when everybody sees the change."""
    seen: list[list[str]] = []

    def edit(draft: Transaction) -> None:
        bench.add("l0")(draft)
        draft.add_event("lease.forced", "root did", owner="ada", lease="l0")
        draft.on_commit.append(lambda: seen.append(list(bench.ledger.snapshot.leases)))

    await bench.ledger.change(edit)
    assert seen == [["l0"]]
    (event,) = bench.store.list_events(after=None, limit=10)
    assert event == EventRow(at=event.at, kind="lease.forced", text="root did", owner="ada", lease="l0", seq=1)


async def read_holders(running: Running) -> dict[str, list[str]]:
    """Who holds what, by the cluster's own view."""
    view = await read(running, "root", "/cluster")
    return {gpu["uuid"]: [who["owner"] for who in gpu["holders"]] for node in view["nodes"] for gpu in node["gpus"]}


async def test_grant_that_cannot_be_written_is_repeated_later(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is refused with what is wrong; the scheduler forgets the grant; the next request gets the GPU."""
    async with asgi_broker(setting) as running:
        save = running.store.save

        def full(changes: Changes) -> None:
            raise Unavailable("the disk is full")

        monkeypatch.setattr(running.store, "save", full)
        refused = await ask(running, "ada", key="1", status=503)
        assert refused["detail"] == "the disk is full"
        monkeypatch.setattr(running.store, "save", save)
        assert await read_holders(running) == {"GPU-rig1-0": [], "GPU-rig2-0": [], "GPU-rig3-0": []}
        lease = await ask(running, "ben", key="2")
        assert lease["state"] == "granted"
        assert (await read_holders(running))["GPU-rig1-0"] == ["ben"]


async def test_a_release_that_cannot_be_written_keeps_the_gpu(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the proof cannot be stored nobody else gets the GPU; as soon as it can, who waits does."""
    async with asgi_broker(setting) as running:
        first = await ask(running, "ada")
        await run_notebook(running, first)
        second = await ask(running, "ben")
        save = running.store.save
        refused = 0

        def no_release(changes: Changes) -> None:
            nonlocal refused
            if any(row.state is LeaseState.RELEASED for _, row in changes.leases):
                refused += 1
                raise Unavailable("the disk is full")
            save(changes)

        monkeypatch.setattr(running.store, "save", no_release)
        async with running.client("ada") as client:
            await client.delete(f"/api/v1/leases/{first['id']}")
        await until(lambda: refused >= 2, "the release is refused twice")
        assert (await read(running, "ben", f"/leases/{second['id']}"))["state"] == "requested"
        assert (await read_holders(running))["GPU-rig1-0"] == ["ada"]
        monkeypatch.setattr(running.store, "save", save)
        await wait_for_state(running, f"/leases/{second['id']}", "granted")

        async def is_shown() -> bool:
            return (await read_holders(running))["GPU-rig1-0"] == ["ben"]

        # The view of the cluster may be older than the lease.
        await until(is_shown, "ben is the holder")


async def test_scheduling_requested_during_a_write_is_not_lost(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is decided upon once more, and once for all reasons that came meanwhile."""
    decided, stored = 0, asyncio.Event()

    async def change(_edit: Callable[[Transaction], None]) -> None:
        nonlocal decided
        decided += 1
        await stored.wait()

    async with asgi_broker(setting) as running:
        with monkeypatch.context() as patch:
            patch.setattr(running.core.ledger, "change", change)
            running.core.request_scheduling()
            await until(lambda: decided == 1, "it is decided, and being stored")
            running.core.request_scheduling()
            running.core.request_scheduling()
            stored.set()
            await until(lambda: decided == 2, "it is decided again")
            await asyncio.sleep(0.05)
            assert decided == 2
