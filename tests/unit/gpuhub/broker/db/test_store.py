"""The store on real SQLite files."""

from __future__ import annotations

import sqlite3
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from gpuhub.broker.db import tables
from gpuhub.broker.db.engine import READ_ONLY
from gpuhub.broker.db.gpu_records import SeenGpu
from gpuhub.broker.db.retention import MAX_OWNER_EVENTS, MAX_UNOWNED_EVENTS
from gpuhub.broker.db.store import Store
from gpuhub.broker.db.writer import Changes
from gpuhub.broker_api.schemas import JobState, Purpose
from gpuhub.common.errors import Conflict, SetupError, Unavailable
from gpuhub.common.gpu import GpuSpec
from gpuhub.domain import job_states, lease_states
from gpuhub.domain.models import EventRow, JobRow, LeaseRow, ReservationRow, ResourceRequest
from gpuhub.nodes.status import Cordon
from gpuhub.scheduler.interface import GpuSlot, NodeAllocation

CARD = GpuSpec(model="RTX 5090", memory_mib=32607)


def build_request(name: str, seq: int) -> LeaseRow:
    return LeaseRow(
        id=name,
        seq=seq,
        key=name,
        groups=("lab",),
        owner="ada",
        purpose=Purpose.NOTEBOOK,
        subject='it\'s "quoted"\n⚙',
        profile="rtx5090",
        resources=ResourceRequest(nodes=2, models=("RTX 5090", "RTX 4090"), least_capability=(8, 9), exclude=("rig3",)),
        created_at=1.5,
        since=1.5,
    )


def build_granted_lease(name: str, seq: int, uuid: str = "GPU-1") -> LeaseRow:
    slot = GpuSlot(uuid=uuid, node="rig1", index=0, card=CARD)
    identities = {"rig1": ("daemon", None)}
    return lease_states.grant(
        build_request(name, seq), [NodeAllocation(node="rig1", slots=(slot,))], 2.5, note="said", identities=identities
    )


def build_share_lease(name: str, seq: int, of: int, number: int) -> LeaseRow:
    slot = GpuSlot(uuid="GPU-1", node="rig1", index=0, card=CARD)
    asked = build_request(name, seq).evolve(resources=ResourceRequest(share=of))
    return lease_states.grant(asked, [NodeAllocation(node="rig1", slots=(slot,))], 2.5, parts={"GPU-1": number})


def test_leases_and_jobs_survive_reopening_the_store(tmp_path: Path) -> None:
    """A lease and a job with workers come back equal, over a restart, in the order in which they came."""
    lease, later = build_granted_lease("l1", 7), build_request("l0", 8)
    job = job_states.start(
        JobRow(
            id="j1",
            run_id="run-000001",
            owner="ada",
            server="",
            notebook_lease="l0",
            lease_id="l1",
            image="gpuhub/notebook:latest",
            nnodes=1,
            nproc_per_node=1,
            created_at=1.0,
            since=1.0,
        ),
        lease,
        3.0,
    )
    store = Store.open_file(tmp_path / "b.sqlite")
    store.save(Changes(leases=[(None, lease), (None, later)], jobs=[(None, job)]))
    started = job_states.record_worker_start(job, 0, "c1", 4.0)
    store.save(Changes(jobs=[(job, started)]))
    store.close()
    store = Store.open_file(tmp_path / "b.sqlite")
    assert store.load_open() == ([lease, later], [started])
    assert store.find_highest()[0] == 8
    assert started.state is JobState.RUNNING
    assert store.find_jobs_by_run("ada", ["run-000001", "run-000002"]) == {"run-000001": started}
    assert store.find_jobs_by_run("ben", ["run-000001"]) == {}
    assert store.find_leases_by_key([("ada", "l1"), ("ben", "l1")]) == {("ada", "l1"): lease}
    store.close()


def test_store_refuses_two_holders_of_a_gpu(tmp_path: Path) -> None:
    """The tables themselves refuse a second holder, in the same transaction or in a later one; nothing is written."""
    store = Store.open_file(tmp_path / "b.sqlite")
    store.save(Changes(leases=[(None, build_granted_lease("l1", 1))]))
    with pytest.raises(sa.exc.IntegrityError, match=r"held_gpus\.gpu_uuid|pk_held_gpus"):
        store.save(Changes(leases=[(None, build_granted_lease("l2", 2))]))
    assert store.get_lease("l2") is None
    with pytest.raises(sa.exc.IntegrityError, match=r"held_gpus\.gpu_uuid|pk_held_gpus"):
        store.save(
            Changes(
                leases=[(None, build_granted_lease("l3", 3, "GPU-2")), (None, build_granted_lease("l4", 4, "GPU-2"))]
            )
        )
    assert store.get_lease("l3") is None
    store.close()


def test_store_refuses_conflicting_gpu_shares(tmp_path: Path) -> None:
    """Parts of one kind share a GPU; a part given twice, one of another kind, and the whole GPU are refused."""
    store = Store.open_file(tmp_path / "b.sqlite")
    first, second = build_share_lease("l1", 1, of=2, number=0), build_share_lease("l2", 2, of=2, number=1)
    store.save(Changes(leases=[(None, first), (None, second)]))
    for refused in (
        build_share_lease("l3", 3, of=2, number=1),
        build_share_lease("l3", 3, of=3, number=2),
        build_granted_lease("l3", 3),
    ):
        with pytest.raises(sa.exc.IntegrityError):
            store.save(Changes(leases=[(None, refused)]))
    assert [lease.id for lease in store.load_open()[0]] == ["l1", "l2"]

    def gone(lease: LeaseRow) -> LeaseRow:
        return lease_states.prove_released(lease_states.release(lease, "stopped", 3.0), "rig1", 4.0)

    store.save(Changes(leases=[(first, gone(first))]))
    with pytest.raises(sa.exc.IntegrityError):
        store.save(Changes(leases=[(None, build_granted_lease("l3", 3))]))
    store.save(Changes(leases=[(second, gone(second)), (None, build_granted_lease("l3", 3))]))
    assert [lease.id for lease in store.load_open()[0]] == ["l3"]
    store.close()


def test_store_refuses_a_share_number_out_of_range(tmp_path: Path) -> None:
    """There is no third half."""
    store = Store.open_file(tmp_path / "b.sqlite")
    with pytest.raises(sa.exc.IntegrityError, match=r"CHECK constraint failed|ck_held_gpus_part"):
        store.save(Changes(leases=[(None, build_share_lease("l1", 1, of=2, number=2))]))
    store.close()


def test_store_refuses_a_second_lease_with_the_same_key(tmp_path: Path) -> None:
    """A second lease of the same owner and key cannot be written; another owner's can."""
    store = Store.open_file(tmp_path / "b.sqlite")
    store.save(Changes(leases=[(None, build_request("l1", 1).evolve(key="same"))]))
    with pytest.raises(Conflict, match="arrived twice at the same moment"):
        store.save(Changes(leases=[(None, build_request("l2", 2).evolve(key="same"))]))
    store.save(Changes(leases=[(None, build_request("l3", 3).evolve(key="same", owner="ben"))]))
    assert [lease.id for lease in store.load_open()[0]] == ["l1", "l3"]
    store.close()


def test_released_gpu_can_be_granted_in_the_same_transaction(tmp_path: Path) -> None:
    """Release and next grant are one step, in whatever order the leases stand."""
    store = Store.open_file(tmp_path / "b.sqlite")
    first = build_granted_lease("l2", 1)
    store.save(Changes(leases=[(None, first)]))
    released = lease_states.prove_released(lease_states.release(first, "stopped", 3.0), "rig1", 4.0)
    store.save(Changes(leases=[(None, build_granted_lease("l1", 2)), (first, released)]))
    assert [lease.id for lease in store.load_open()[0]] == ["l1"]
    assert store.get_lease("l2") == released
    store.close()


def test_second_broker_on_the_same_store_is_refused(tmp_path: Path) -> None:
    """Two brokers would each believe to be the only one."""
    store = Store.open_file(tmp_path / "b.sqlite")
    with pytest.raises(SetupError, match="another broker runs"):
        Store.open_file(tmp_path / "b.sqlite")
    store.close()
    Store.open_file(tmp_path / "b.sqlite").close()


def test_migrations_create_the_tables_of_the_model(tmp_path: Path) -> None:
    """Alembic finds no difference between what it made and what the code expects."""
    Store.open_file(tmp_path / "b.sqlite").close()
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'b.sqlite'}")
    with engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), tables.metadata)
        version = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one()
    engine.dispose()
    assert differences == []
    assert version == "0019"


def test_error_for_an_unreadable_store_names_the_file(tmp_path: Path) -> None:
    """A file that is no database is refused with its path, and the lock is free again."""
    (tmp_path / "b.sqlite").write_text("this is not a database, it only has its name" * 50)
    for _ in range(2):
        with pytest.raises(SetupError, match=r"b\.sqlite.*file is not a database"):
            Store.open_file(tmp_path / "b.sqlite")


def test_locked_store_is_reported_as_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process keeps the file locked, a change is refused as unavailable, and nothing is written."""
    monkeypatch.setattr("gpuhub.broker.db.engine.BUSY_TIMEOUT_S", 0.05)
    store = Store.open_file(tmp_path / "b.sqlite")
    blocker = sqlite3.connect(tmp_path / "b.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="database is locked"):
        store.save(Changes(leases=[(None, build_request("l1", 1))]))
    blocker.execute("ROLLBACK")
    blocker.close()
    assert store.load_open() == ([], [])
    store.close()


def test_threads_write_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that change the store at the same time wait for each other, and not for SQLite, which has no order."""
    monkeypatch.setattr("gpuhub.broker.db.engine.BUSY_TIMEOUT_S", 0)
    store = Store.open_file(tmp_path / "b.sqlite")

    def save(thread: int) -> None:
        for number in range(20):
            store.save(Changes(leases=[(None, build_request(f"l{thread}-{number}", 100 * thread + number))]))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(save, range(4)))
    assert len(store.load_open()[0]) == 80
    store.close()


def test_changes_that_wait_for_the_disk_are_reported_as_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that waits too long for another thread's is refused; reading goes on, and later changes are written."""
    monkeypatch.setattr("gpuhub.broker.db.store._TURN_S", 0.05)
    store = Store.open_file(tmp_path / "b.sqlite")
    with store._transaction(), ThreadPoolExecutor(1) as thread:
        refused = thread.submit(store.save, Changes(leases=[(None, build_request("l1", 1))]))
        with pytest.raises(Unavailable, match="earlier changes have waited for the disk"):
            refused.result()
        assert thread.submit(store.load_open).result() == ([], [])
    store.save(Changes(leases=[(None, build_request("l1", 1))]))
    assert len(store.load_open()[0]) == 1
    store.close()


def test_readers_do_not_wait_for_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a change is being written, even by another process, everything can be read as it was before."""
    monkeypatch.setattr("gpuhub.broker.db.engine.BUSY_TIMEOUT_S", 0.05)
    store = Store.open_file(tmp_path / "b.sqlite")
    lease = build_granted_lease("l1", 1)
    store.save(Changes(leases=[(None, lease)]))
    writer = sqlite3.connect(tmp_path / "b.sqlite", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("DELETE FROM held_gpus")
    assert store.get_lease("l1") == lease
    assert store.find_leases_by_key([("ada", "l1")]) == {("ada", "l1"): lease}
    assert store.load_open() == ([lease], [])
    writer.execute("ROLLBACK")
    writer.close()
    store.close()


def test_transaction_that_outlives_the_store_closes_its_connection(tmp_path: Path) -> None:
    """A thread of a request that was given up still reads when the broker ends."""
    store = Store.open_file(tmp_path / "b.sqlite")
    with store._transaction(READ_ONLY) as reader:
        driver = reader.connection.dbapi_connection
        assert driver is not None
        store.close()
        assert reader.exec_driver_sql("SELECT 1").scalar_one() == 1
    with pytest.raises(reader.dialect.loaded_dbapi.Error, match="closed"):
        driver.cursor()


def test_every_commit_is_synced_before_it_counts(tmp_path: Path) -> None:
    """SQLite syncs the log of each transaction to the disk before the commit returns, on every connection."""
    store = Store.open_file(tmp_path / "b.sqlite")
    with store._transaction(READ_ONLY) as reader, store._transaction() as writer:
        for connection in (reader, writer):
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
    store.close()


def test_store_file_is_private(tmp_path: Path) -> None:
    """Who holds what is nobody else's to read from the disk."""
    Store.open_file(tmp_path / "b.sqlite").close()
    assert (tmp_path / "b.sqlite").stat().st_mode & 0o077 == 0


def test_last_seen_gpus_are_stored_by_node(tmp_path: Path) -> None:
    """A node's list is replaced as a whole, and a card that moved is taken from its old node."""
    store = Store.open_file(tmp_path / "b.sqlite")

    def seen(uuid: str, node: str) -> SeenGpu:
        return SeenGpu(
            uuid=uuid, node=node, index=0, model="RTX 5090", memory_mib=1, capability=(12, 0), is_mig=True, seen_at=1.0
        )

    store.save_seen_gpus("rig1", [seen("a", "rig1"), seen("b", "rig1")])
    store.save_seen_gpus("rig2", [seen("b", "rig2")])
    assert sorted((gpu.uuid, gpu.node) for gpu in store.load_seen_gpus()) == [("a", "rig1"), ("b", "rig2")]
    store.save_seen_gpus("rig1", [])
    assert store.load_seen_gpus() == [seen("b", "rig2")]
    store.close()


def test_usage_ends_at_release_or_quarantine(tmp_path: Path) -> None:
    """What counts for fair share: each GPU from the grant to its proof, or to the quarantine; nothing that is held."""
    store = Store.open_file(tmp_path / "b.sqlite")
    ended = lease_states.prove_released(
        lease_states.release(build_granted_lease("l1", 1), "stopped", 3.0), "rig1", 10.0
    )
    stuck = lease_states.quarantine(
        lease_states.release(build_granted_lease("l2", 2, "GPU-2"), "stopped", 3.0), "no answer", 5.0
    )
    forced = lease_states.force_release(stuck, "root", 11.0)
    held = build_granted_lease("l3", 3, "GPU-3")
    still = lease_states.quarantine(
        lease_states.release(build_granted_lease("l4", 4, "GPU-4"), "stopped", 3.0), "no answer", 6.0
    )
    store.save(Changes(leases=[(None, ended), (None, forced), (None, held), (None, still)]))
    assert [(s.owner, s.groups, s.card, s.started_at, s.ended_at) for s in store.load_usage(0.0)] == [
        ("ada", frozenset({"lab"}), CARD, 2.5, 10.0),
        ("ada", frozenset({"lab"}), CARD, 2.5, 5.0),
        ("ada", frozenset({"lab"}), CARD, 2.5, 6.0),
    ]
    assert [s.ended_at for s in store.load_usage(10.5)] == [5.0]
    store.close()


def test_the_newest_events_are_kept(tmp_path: Path) -> None:
    """Read from the newest back, or on from a number; older ones than are kept are gone; numbers come once."""
    kept = MAX_UNOWNED_EVENTS
    store = Store.open_file(tmp_path / "b.sqlite")

    def build_event(text: str, owner: str | None = None) -> EventRow:
        return EventRow(at=1.0, kind="lease.granted", text=text, owner=owner)

    store.save_events([build_event(str(number), "ada" if number % 2 else None) for number in range(2 * kept)])
    newest = store.list_events(after=None, limit=2)
    assert [event.text for event in newest] == [str(2 * kept - 2), str(2 * kept - 1)]
    assert store.list_events(after=newest[0].seq, limit=10) == newest[1:]
    assert [event.owner for event in store.list_events(after=None, limit=2, owner="ada")] == ["ada", "ada"]
    store.save_events([build_event("last")])
    assert store.list_events(after=None, limit=1)[0].seq == newest[-1].seq + 1
    assert store.list_events(after=0, limit=1)[0].text == "2"
    store.close()


def test_events_are_shared_fairly(tmp_path: Path) -> None:
    """However many events one owner causes, those of others and those of no owner stay, and so do the owner's newest."""
    store = Store.open_file(tmp_path / "b.sqlite")

    def build_events(owner: str | None, count: int) -> list[EventRow]:
        return [EventRow(at=1.0, kind="lease.granted", text=str(number), owner=owner) for number in range(count)]

    store.save_events([*build_events("ben", 300), *build_events(None, 40)])
    flood = build_events("ada", 20_000)
    for first in range(0, len(flood), 1000):
        store.save(Changes(events=flood[first : first + 1000]))
    everything = store.list_events(after=0, limit=30_000)
    assert Counter(event.owner for event in everything) == {"ada": MAX_OWNER_EVENTS, "ben": 300, None: 40}
    assert store.list_events(after=0, limit=1, owner="ada")[0].text == str(20_000 - MAX_OWNER_EVENTS)
    store.close()


def test_old_events_are_deleted(tmp_path: Path) -> None:
    """In batches, until none from before the time is left."""
    store = Store.open_file(tmp_path / "b.sqlite")
    store.save_events([EventRow(at=float(number), kind="k", text=str(number)) for number in range(1300)])
    deleted = []
    while count := store.delete_old_events(1200.0):
        deleted.append(count)
    assert (sum(deleted), max(deleted)) == (1200, 500)
    assert store.list_events(after=0, limit=1)[0].text == "1200"
    store.close()


def test_events_of_changes_are_limited(tmp_path: Path) -> None:
    """What is told together with a change pushes out the oldest as well."""
    store = Store.open_file(tmp_path / "b.sqlite")
    events = [EventRow(at=1.0, kind="lease.granted", text=str(number)) for number in range(MAX_UNOWNED_EVENTS + 5)]
    store.save(Changes(events=events))
    assert store.list_events(after=0, limit=1)[0].text == "5"
    store.close()


def test_cordons_and_reservations_are_stored(tmp_path: Path) -> None:
    """Cordons are replaced and taken away by node; reservations come back as they were."""
    store = Store.open_file(tmp_path / "b.sqlite")
    cordon = Cordon(node="rig1", by="root", reason="new fans", at=1.0)
    drain = Cordon(node="rig1", state="draining", by="root", at=2.0, grace_s=60)
    store.save_cordon("rig1", cordon)
    assert store.load_cordons() == [cordon]
    store.save_cordon("rig1", drain)
    assert store.load_cordons() == [drain]
    store.save_cordon("rig1", None)
    assert store.load_cordons() == []
    kept = ReservationRow(
        id="r1", name="course", nodes=("rig1",), gpus=("GPU-1",), users=("ada",), groups=(), starts_at=1.0, ends_at=2.0,
        created_by="root",
    )  # fmt: skip
    store.save_reservation(kept)
    assert store.load_reservations() == [kept]
    store.delete_reservations(["r1"])
    assert store.load_reservations() == []
    store.close()
