"""What the accounts of usage keep: exact sums, however many short leases there were, in bounded memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuhub.common.gpu import GpuSpec
from gpuhub.scheduler.interface import SchedulingParameters, UsageRecord
from gpuhub.scheduler.usage import WEEK_S, UsageLedger

CARD = GpuSpec(model="RTX 5090", memory_mib=32607)
START = 1_700_000_000.0


def build_record(started_at: float, seconds: float, *, share: int = 1) -> UsageRecord:
    return UsageRecord(
        owner="ada",
        groups=frozenset({"lab"}),
        card=CARD,
        share=share,
        started_at=started_at,
        ended_at=started_at + seconds,
    )


def test_many_short_leases_are_few_spans() -> None:
    """Ten thousand leases of some seconds add up exactly, and as fast as a hundred; they leave the week with their slot."""
    ledger = UsageLedger(SchedulingParameters())
    records = [build_record(START + 8 * number, 5 + number % 3, share=1 + number % 2) for number in range(10_000)]
    for record in records:
        ledger.record(record)
    end = records[-1].ended_at
    hours = sum((record.ended_at - record.started_at) / record.share for record in records) / 3600
    assert ledger.week_hours("ada", end) == pytest.approx(hours)
    assert ledger.group_week_hours("lab", end) == pytest.approx(hours)
    # One for each ten minutes, and those that reach from one into the next.
    assert len(ledger._owners["ada"].spans) <= 2 * (80_000 / 600 + 1) + 1
    later = START + WEEK_S + 40_000
    left = sum(max(0.0, record.ended_at - max(record.started_at, later - WEEK_S)) / record.share for record in records)
    assert ledger.week_hours("ada", later) == pytest.approx(left / 3600, abs=600 / 3600)
    assert ledger.week_hours("ada", end + WEEK_S) == 0


def test_long_leases_stay_apart() -> None:
    """A lease that reaches over several slots leaves the week second by second."""
    ledger = UsageLedger(SchedulingParameters())
    for number in range(20):
        ledger.record(build_record(START + 1000 * number, 900))
    now = START + WEEK_S + 450
    assert ledger.week_hours("ada", now) == pytest.approx((20 * 900 - 450) / 3600)


def test_an_average_counts_like_its_gpus() -> None:
    """Usage that is kept by day has a number of GPUs, which may be a fraction."""
    ledger, other = UsageLedger(SchedulingParameters()), UsageLedger(SchedulingParameters())
    ledger.record(replace(build_record(START, 7200), gpus=2.5))
    for _ in range(5):
        other.record(build_record(START, 7200, share=2))
    now = START + 9000
    assert ledger.week_hours("ada", now) == pytest.approx(other.week_hours("ada", now)) == pytest.approx(5)
    assert ledger.decayed_usage(now)("ada") == pytest.approx(other.decayed_usage(now)("ada"))
