"""Energy between readings, what is said about a record, and when a smaller GPU is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuhub.broker_api.schemas import Purpose
from gpuhub.common.gpu import GpuSpec
from gpuhub.domain import costs
from gpuhub.domain.costs import CardSupply, CostRecord, EnergySample, UsedAmounts
from gpuhub.domain.models import ResourceRequest

CARDS = {
    "rig1": (GpuSpec(model="RTX 5090", memory_mib=32607, capability=(12, 0)),),
    "rig2": (GpuSpec(model="RTX 5070", memory_mib=12227, capability=(12, 0)),),
    "rig3": (GpuSpec(model="RTX 5060", memory_mib=8151, capability=(12, 0)),),
    "rig4": (GpuSpec(model="RTX 3090", memory_mib=24576, capability=(8, 6)),) * 2,
    "rig5": None,
}
USED = UsedAmounts(
    gpu_s=3600, measured_s=3590, busy_s=1113, peak_memory_mib=5120, metered_s=3600, energy_j=1_512_000, amount=0.184
)


def sample(at: float, **values: Any) -> EnergySample:
    return EnergySample(at=at, **values)


def build_record(**changes: Any) -> CostRecord:
    record = CostRecord(
        id="j1", owner="ada", groups=(), purpose=Purpose.JOB, profile="", name="train.py", model="RTX 5090", gpu_count=1,
        memory_mib=32607, started_at=0.0, used=USED,
    )  # fmt: skip
    return replace(record, **changes)


def advise(record: CostRecord, resources: ResourceRequest | None = None, nodes: tuple[str, ...] = tuple(CARDS)) -> Any:
    return costs.find_smaller_card(record, resources or ResourceRequest(), CardSupply.count(CARDS), nodes)


def test_cost_is_gpu_time_and_energy_at_their_prices() -> None:
    """GPU time counts in hours and energy in kilowatt-hours; energy that was not measured costs nothing."""
    assert costs.compute_cost(USED, gpu_hour=2.0, kwh=0.5) == pytest.approx(2.21)
    assert costs.compute_cost(UsedAmounts(gpu_s=1800), gpu_hour=2.0, kwh=0.5) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"counter_mj": 5_000}, {"counter_mj": 905_000}, (900.0, False)),
        # The driver was reloaded: only what the new counter has is known.
        ({"counter_mj": 9_000_000}, {"counter_mj": 400_000}, (400.0, True)),
        # Neither a counter that fell a little nor one that jumped is believed.
        (
            {"counter_mj": 9_000_000_000, "power_w": 100.0},
            {"counter_mj": 8_999_999_000, "power_w": 300.0},
            (400.0, True),
        ),
        ({"counter_mj": 0, "power_w": 100.0}, {"counter_mj": 10**15, "power_w": 100.0}, (200.0, True)),
        ({"power_w": 100.0}, {"power_w": 200.0}, (300.0, True)),
        ({}, {"power_w": 50.0}, (100.0, True)),
        ({}, {}, None),
    ],
)
def test_energy_between_two_samples(before: Any, after: Any, expected: tuple[float, bool] | None) -> None:
    """By the counter where it is plausible, else by power, which is an estimate; None where nothing is known."""
    measured = costs.measure_energy(sample(10.0, **before), sample(12.0, **after))
    assert (None if measured is None else (measured.joules, measured.is_estimate)) == expected


def test_power_says_nothing_about_a_long_gap() -> None:
    """After a gap only a counter knows what was used in it."""
    assert costs.measure_energy(sample(0.0, power_w=100.0), sample(60.0, power_w=100.0)) is None
    measured = costs.measure_energy(sample(0.0, counter_mj=0), sample(3600.0, counter_mj=360_000_000))
    assert measured == costs.MeasuredEnergy(360_000.0, False)


def test_limit_of_the_power_bounds_the_counter() -> None:
    """The same difference is believed of a large GPU alone."""
    before, after = sample(0.0, counter_mj=0, limit_w=75.0), sample(2.0, counter_mj=5_000_000, limit_w=75.0)
    assert costs.measure_energy(before, after) is None
    assert costs.measure_energy(replace(before, limit_w=700.0), replace(after, limit_w=700.0)) is not None


@pytest.mark.parametrize(
    ("changes", "used", "line"),
    [
        ({"currency": "EUR", "advice": "RTX 5060"}, {},
         "GPU 31 % busy, 5.0 of 32 GB, 0.42 kWh, 0.18 EUR; an RTX 5060 would have been enough"),
        ({"advice": "Tesla T4"}, {"energy_j": 11_160.0, "estimated_j": 1.0},
         "GPU 31 % busy, 5.0 of 32 GB, about 3.1 Wh (estimated); a Tesla T4 would have been enough"),
        ({"gpu_count": 2, "advice": "RTX 5060"}, {"peak_memory_mib": 0, "metered_s": 0.0},
         "2 GPUs 31 % busy; RTX 5060 GPUs would have been enough"),
        ({"gpu_count": 4}, {"measured_s": 0.0, "peak_memory_mib": 0, "metered_s": 0.0}, "4 GPUs for 1.0 GPU-hours"),
        ({}, {"gpu_s": 120.0, "measured_s": 0.0, "peak_memory_mib": 20480, "metered_s": 0.0},
         "GPU for 2.0 GPU-minutes, 20 of 32 GB"),
    ],
)  # fmt: skip
def test_line_for_users(changes: Any, used: Any, line: str) -> None:
    """Only what was measured is in the line, and an estimate is called one."""
    assert costs.describe_costs(build_record(used=replace(USED, **used), **changes)) == line


def test_smallest_card_with_room_is_named() -> None:
    """The RTX 5060 has room for 5 GB; for 8 GB with a reserve it is the RTX 5070."""
    assert advise(build_record()) == "RTX 5060"
    assert advise(build_record(used=replace(USED, peak_memory_mib=8192))) == "RTX 5070"


@pytest.mark.parametrize(
    "changes",
    [
        # Too short, or not measured for most of the time.
        {"gpu_s": 200.0, "measured_s": 200.0, "busy_s": 60.0},
        {"measured_s": 1800.0},
        # Busy, so that a slower GPU would have taken longer.
        {"busy_s": 3000.0},
        # No smaller GPU of the same capability has room: the RTX 3090 lacks what the RTX 5090 can do.
        {"peak_memory_mib": 15000},
        {"peak_memory_mib": 0},
    ],
)
def test_no_smaller_card_without_evidence(changes: Any) -> None:
    """Short, unmeasured, busy or large work gets no advice."""
    assert advise(build_record(used=replace(USED, **changes))) is None


def test_smaller_cards_must_be_there_for_the_owner_and_the_request() -> None:
    """Nodes of others do not count, nor too few GPUs; a share of a GPU and an unknown card get no advice."""
    assert advise(build_record(), nodes=("rig1", "rig2")) == "RTX 5070"
    assert advise(build_record(), ResourceRequest(gpus_per_node=2)) is None
    assert advise(build_record(), ResourceRequest(nodes=2)) is None
    assert advise(build_record(), ResourceRequest(share=2)) is None
    assert advise(build_record(), ResourceRequest(least_capability=(12, 1))) is None
    assert advise(build_record(model="RTX 6090")) is None
    assert advise(build_record(model="RTX 5070, RTX 5090", gpu_count=2)) is None
