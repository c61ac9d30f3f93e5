"""The verdict of the soak: what leaks is found, what only fluctuates is not."""

from __future__ import annotations

import random

import pytest

from tests.soak.verdict import LIMITS, MIN_SAMPLES, Sample, find_slope, format_table, judge


def series(name: str, values: list[float]) -> list[Sample]:
    """Return a sample with this series for each minute."""
    return [Sample(60.0 * number, {name: value}) for number, value in enumerate(values)]


@pytest.mark.parametrize("kind", list(LIMITS))
def test_leak_is_found_below_noise(kind: str) -> None:
    """Twice the limit over the second half, below noise of the same size."""
    chance = random.Random(1)
    limit = LIMITS[kind].of(100)
    values = [100 + 4 * limit * minute / 120 + chance.uniform(-limit, limit) for minute in range(121)]
    (trend,) = judge(series(f"hub.{kind}", values))
    assert not trend.is_flat
    assert "**grows**" in format_table([trend])


@pytest.mark.parametrize("kind", list(LIMITS))
def test_noise_and_growth_in_the_first_half_are_flat(kind: str) -> None:
    """Caches that fill in the first half, and a few high samples in the second."""
    chance = random.Random(2)
    limit = LIMITS[kind].of(100)
    values = [100 - max(0, 50 - minute) + chance.uniform(-limit, limit) for minute in range(121)]
    values[-5] = values[-9] = values[-30] = 400
    (trend,) = judge(series(f"hub.{kind}", values))
    assert trend.is_flat, trend


def test_series_with_few_samples_is_not_flat() -> None:
    """What was not looked at is not called flat."""
    (trend,) = judge(series("hub.memory_mib", [1.0] * MIN_SAMPLES))
    assert not trend.is_flat
    assert "samples" in trend.problem


def test_growth_of_a_process_that_was_started_again_is_not_called_flat() -> None:
    """A process with another id has lost what the earlier one kept."""
    samples = [
        Sample(float(number), {"hub.memory_mib": 100.0, "log_mib": 1.0}, {"hub": (number // 15,)})
        for number in range(20)
    ]
    hub, log = judge(samples)
    assert (hub.name, hub.is_flat, log.is_flat) == ("hub.memory_mib", False, True)


def test_no_samples_are_an_error() -> None:
    """An empty run has no verdict."""
    with pytest.raises(ValueError, match="no sample"):
        judge([])


def test_slope() -> None:
    """An exact line, with one outlier of five points."""
    assert find_slope([(0, 1), (1, 3), (2, 5), (3, 100), (4, 9)]) == 2
