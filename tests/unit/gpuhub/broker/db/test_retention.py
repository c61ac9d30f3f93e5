"""What the store forgets, and what it keeps of it: 10,000 lives of leases leave few rows, and the owners' usage."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from gpuhub.broker.db import tables
from gpuhub.broker.db.retention import split_days
from gpuhub.broker.db.store import Store
from gpuhub.broker.db.writer import Changes
from gpuhub.broker.state.broker_state import EVENTS_KEPT_S, LEASES_KEPT_S
from gpuhub.broker_api.schemas import LeaseState, Purpose
from gpuhub.config.settings import JobSettings
from gpuhub.domain.models import LeasedGpu, LeaseRow, ResourceRequest
from gpuhub.scheduler.interface import SchedulingParameters
from gpuhub.scheduler.usage import UsageLedger
from tests.support.broker.calls import ask, delete, post, read, wait_for_state
from tests.support.broker.in_process import Setting, asgi_broker, until
from tests.support.clocks import AheadClock
from tests.support.docker.simulated_nodes import build_cluster

DAY_S = 86400.0
START = 20_000 * DAY_S


def build_life(
    number: int, granted_at: float, *, hours: float = 1.0, owner: str = "ada", node: str = "rig1"
) -> LeaseRow:
    """Return a lease that has had a GPU, and has ended."""
    ended_at = granted_at + hours * 3600
    gpu = LeasedGpu(
        uuid="GPU-1", node=node, index=0, model="RTX 5090", memory_mib=32607, worker=0, share=1 + number % 2, part=0,
        released_at=ended_at,
    )  # fmt: skip
    return LeaseRow(
        id=f"l{number}", seq=number, key=f"k{number}", owner=owner, groups=("lab",), purpose=Purpose.NOTEBOOK,
        subject="", profile="any", resources=ResourceRequest(), created_at=granted_at, since=ended_at,
        state=LeaseState.RELEASED, granted_at=granted_at, released_at=ended_at, nodes=(node,), gpus=(gpu,), version=1,
    )  # fmt: skip


def count_rows(store: Store) -> dict[str, int]:
    """Return the number of rows of each table that has some."""
    with store._engine.connect() as connection:
        counts = {
            table.name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in tables.metadata.sorted_tables
        }
    return {name: count for name, count in counts.items() if count}


def compute_decayed(store: Store, now: float) -> float:
    """Return ada's decayed usage as fair share computes it after a restart."""
    ledger = UsageLedger(SchedulingParameters())
    for record in sorted(store.load_usage(0.0), key=lambda record: record.ended_at):
        ledger.record(record)
    return ledger.decayed_usage(now)("ada")


def delete_all(store: Store, before: float) -> int:
    """Delete all leases from before a time, batch by batch."""
    count = 0
    while deleted := store.delete_released_leases(before):
        count += deleted
    return count


def test_ten_thousand_leases_leave_few_rows(tmp_path: Path) -> None:
    """Over a year with its retention once a day, the store has the last days' leases, and a row for each day before."""
    store = Store.open_file(tmp_path / "b.sqlite")
    most = 0
    for day in range(365):
        now = START + day * DAY_S
        lives = [build_life(28 * day + number, now + 3000 * number, hours=0.5) for number in range(28)]
        store.save(Changes(leases=[(None, life) for life in lives]))
        delete_all(store, now - LEASES_KEPT_S)
        store.delete_old_usage(now - 70 * DAY_S)
        most = max(most, sum(count_rows(store).values()))
    assert store.find_highest()[0] == 365 * 28 - 1
    # Nine days of leases, each with a GPU, 70 days of usage, and the end on the only node.
    assert most <= 2 * 28 * 10 + 72 + 1
    store.close()


def test_usage_of_deleted_leases_stays(tmp_path: Path) -> None:
    """Fair share after a restart counts as before within a few percent, however often leases were deleted."""
    store = Store.open_file(tmp_path / "b.sqlite")
    now = START + 30 * DAY_S
    lives = [build_life(number, START + number * 7 * 3600, hours=1 + number % 40) for number in range(80)]
    store.save(Changes(leases=[(None, life) for life in lives]))
    hours = sum(record.gpus / record.share * (record.ended_at - record.started_at) for record in store.load_usage(0.0))
    before = compute_decayed(store, now)
    assert delete_all(store, START + 4 * DAY_S) < delete_all(store, START + 20 * DAY_S)
    assert delete_all(store, START + 20 * DAY_S) == 0
    assert compute_decayed(store, now) == pytest.approx(before, rel=0.05)
    after = sum(record.gpus / record.share * (record.ended_at - record.started_at) for record in store.load_usage(0.0))
    assert after == pytest.approx(hours)
    store.delete_old_usage(START + 5.5 * DAY_S)
    assert min(record.started_at for record in store.load_usage(0.0)) == START + 5 * DAY_S
    store.close()


def test_last_ends_of_deleted_leases_stay(tmp_path: Path) -> None:
    """Idle scratch volumes are removed by them, whether the lease is still stored or not."""
    store = Store.open_file(tmp_path / "b.sqlite")
    lives = [
        build_life(1, START), build_life(2, START + DAY_S), build_life(3, START, node="rig2"),
        build_life(4, START + 5 * DAY_S), build_life(5, START, owner="ben"),
    ]  # fmt: skip
    store.save(Changes(leases=[(None, life) for life in lives]))
    ends = store.find_last_lease_ends()
    assert ends["ada", "rig2"] == START + 3600
    for days in (0.5, 3, 9):
        delete_all(store, START + days * DAY_S)
        assert store.find_last_lease_ends() == ends
    assert store.load_open() == ([], [])
    assert "leases" not in count_rows(store)
    store.close()


def test_leases_that_are_open_or_have_a_job_stay(tmp_path: Path) -> None:
    """Whatever their age; a lease that never had a GPU leaves nothing."""
    store = Store.open_file(tmp_path / "b.sqlite")
    waiting = build_life(1, START).evolve(
        state=LeaseState.REQUESTED, granted_at=None, released_at=None, nodes=(), gpus=()
    )
    withdrawn = build_life(2, START).evolve(granted_at=None, nodes=(), gpus=())
    store.save(Changes(leases=[(None, waiting), (None, withdrawn)]))
    assert delete_all(store, START + DAY_S) == 1
    assert count_rows(store) == {"leases": 1}
    assert [lease.id for lease in store.load_open()[0]] == ["l1"]
    store.close()


def test_periods_are_split_by_days() -> None:
    """Each second counts on its day (UTC)."""
    assert list(split_days(START - 10, START + DAY_S + 5)) == [(19_999, 10.0), (20_000, DAY_S), (20_001, 5.0)]
    assert list(split_days(START, START)) == []


async def test_the_broker_forgets_what_ended_long_ago(setting: Setting) -> None:
    """Jobs, leases and events go when their time is over; usage stays longer than the leases."""
    setting.clock = clock = AheadClock()
    setting.cluster = build_cluster(jobs=JobSettings(remember="7d"))
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", profile="rtx5090")
        job = await post(running, "ada", "/jobs", {"run_id": "run-000001", "detached": True}, 201)
        await wait_for_state(running, f"/jobs/{job['id']}", "running")
        await delete(running, "ada", f"/leases/{lease['id']}")
        await delete(running, "ada", f"/jobs/{job['id']}")
        await until(lambda: not running.core.ledger.snapshot.leases, "both have ended")
        usage = running.store.load_usage(0.0)
        written = {event.seq for event in running.store.list_events(after=0, limit=1000)}
        assert written
        clock.ahead_s = 7.5 * DAY_S
        await running.core.forget_ended()
        await read(running, "ada", f"/jobs/{job['id']}", 404)
        for lease_id in (lease["id"], job["lease"]["id"]):
            assert (await read(running, "ada", f"/leases/{lease_id}"))["state"] == "released"
        clock.ahead_s = 8.5 * DAY_S
        await running.core.forget_ended()
        for lease_id in (lease["id"], job["lease"]["id"]):
            await read(running, "ada", f"/leases/{lease_id}", 404)
        assert sum(record.gpus * (record.ended_at - record.started_at) for record in running.store.load_usage(0.0)) == (
            pytest.approx(sum(record.ended_at - record.started_at for record in usage))
        )
        clock.ahead_s = EVENTS_KEPT_S + DAY_S
        await running.core.forget_ended()
        assert not {"leases", "lease_gpus", "jobs", "workers", "usage_days"} & count_rows(running.store).keys()
        # There may be new ones, such as that a node was slow to answer.
        assert not written & {event.seq for event in running.store.list_events(after=0, limit=1000)}
