"""Records and sums by day in the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from gpuhub.broker.db.cost_store import MAX_GROUPS_LENGTH, encode_groups
from gpuhub.broker.db.store import Store
from gpuhub.broker_api.schemas import Purpose
from gpuhub.domain.costs import CostRecord, DayKey, EnergySample, GpuMeter, UsedAmounts

METER = GpuMeter(
    lease="l1", uuid="GPU-1", node="rig1", model="RTX 5090", memory_mib=32607, share=1, charged_until=20.0,
    energy=EnergySample(at=19.5, counter_mj=2**50, power_w=300.5),
)  # fmt: skip
RECORD = CostRecord(
    id="j1", owner="ada", groups=("lab",), purpose=Purpose.JOB, profile="", name="train.py", model="RTX 5090",
    gpu_count=1, memory_mib=32607, started_at=10.0, used=UsedAmounts(gpu_s=10.0, peak_memory_mib=5, energy_j=1.5),
    currency="EUR", meters=(METER, replace(METER, uuid="GPU-2", energy=None)),
)  # fmt: skip
DAY = DayKey(day=20_000, owner="ada", groups=("lab", "vision"), profile="big", model="RTX 5090", currency="EUR")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open_file(tmp_path / "broker.sqlite")
    yield store
    store.close()


def test_records_come_back_as_they_were(store: Store) -> None:
    """With their meters, also after they were replaced; an ended one is no longer open."""
    store.costs.save([RECORD], {})
    assert store.costs.load_open() == [RECORD]
    ended = replace(RECORD, ended_at=30.0, meters=(), advice="RTX 5060")
    store.costs.save([ended], {})
    assert store.costs.load_open() == []
    assert store.costs.find(["j1", "j2"]) == {"j1": ended}
    assert store.costs.list_ended("ada", 5) == store.costs.list_ended(None, 5) == [ended]
    assert store.costs.list_ended("ben", 5) == []


def test_days_are_summed(store: Store) -> None:
    """Amounts are added, peaks are not; by every dimension, in a range of days, for one owner or all."""
    used = UsedAmounts(gpu_s=60.0, measured_s=50.0, busy_s=5.0, peak_memory_mib=100, energy_j=7.0, amount=0.5)
    store.costs.save([], {DAY: used})
    store.costs.save([], {DAY: replace(used, peak_memory_mib=50), replace(DAY, owner="ben", groups=()): used})
    store.costs.save([], {replace(DAY, day=20_006, profile=""): replace(used, peak_memory_mib=400)})
    [total] = store.costs.sum_days(None, since=0, until=20_000, owner=None, limit=9)
    assert (total.used.gpu_s, total.used.amount, total.used.peak_memory_mib) == (180.0, 1.5, 100)
    keys = {
        by: [entry.key for entry in store.costs.sum_days(by, since=0, until=30_000, owner=None, limit=9)]
        for by in ("user", "group", "profile", "model", "week", "day")
    }
    assert keys["user"] == ["ada", "ben"]
    assert [json.loads(str(key)) for key in keys["group"]] == [["lab", "vision"], []]
    assert keys["profile"] == ["", "big"]
    assert keys["day"] == [20_000, 20_006]
    first_days = [date.fromordinal(date(1970, 1, 1).toordinal() + int(key)) for key in keys["week"]]
    assert [day.isoweekday() for day in first_days] == [1, 1]
    assert date.fromordinal(date(1970, 1, 1).toordinal() + 20_000) >= first_days[0]
    [mine] = store.costs.sum_days("user", since=20_000, until=20_000, owner="ada", limit=9)
    assert (mine.key, mine.used.gpu_s) == ("ada", 120.0)


def test_old_records_and_days_are_deleted(store: Store) -> None:
    """What has not ended stays, however old it is."""
    ended = [replace(RECORD, id=f"j{number}", ended_at=float(number), meters=()) for number in range(3)]
    store.costs.save(
        [*ended, replace(RECORD, id="open")], {DAY: UsedAmounts(gpu_s=1), replace(DAY, day=19_999): UsedAmounts()}
    )
    assert store.costs.delete_ended(2.0) == 2
    assert store.costs.delete_ended(2.0) == 0
    assert set(store.costs.find(["j0", "j1", "j2", "open"])) == {"j2", "open"}
    store.costs.delete_days(20_000)
    assert [entry.key for entry in store.costs.sum_days("day", since=0, until=30_000, owner=None, limit=9)] == [20_000]


def test_too_many_groups_are_cut_at_a_name() -> None:
    """The list is part of a key, whose length databases limit."""
    text = encode_groups([f"group-{number:04}" for number in range(500)])
    assert len(text) <= MAX_GROUPS_LENGTH
    assert json.loads(text)[0] == "group-0000"
