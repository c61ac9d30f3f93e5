"""Whether a series of samples is flat or grows: a robust line through the second half of the run.

The first half has every kind of fault, also kills of hub and broker, and fills caches. In the second half the watched
processes live on, so that what they keep adds up. The Theil-Sen slope, the median of the slopes between all pairs of
samples, ignores single outliers and samples of a moment when much was going on.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a moment when no user waits for anything."""

    at_s: float
    #: By name, such as `hub.memory_mib`; the part after the last dot is the kind.
    values: Mapping[str, float]
    #: Process ids of what must live through the second half, by name.
    pids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limit:
    """Growth over the second half that is still flat: the larger of an amount and a share of the median."""

    amount: float
    share: float

    def of(self, median: float) -> float:
        """Return the limit of a series with this median."""
        return max(self.amount, self.share * median)


LIMITS = {
    "memory_mib": Limit(8, 0.05),
    "descriptors": Limit(5, 0.05),
    "threads": Limit(5, 0.05),
    "processes": Limit(3, 0.05),
    "database_mib": Limit(4, 0.05),
    "log_mib": Limit(16, 0.05),
    "containers": Limit(0.5, 0),
    "networks": Limit(0.5, 0),
    "volumes": Limit(0.5, 0),
}
#: Fewer samples of a series in the second half are no base for a verdict.
MIN_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Trend:
    """One series over the second half of the run."""

    name: str
    samples: int
    median: float
    largest: float
    #: The slope times the length of the second half.
    growth: float
    limit: float
    #: Why nothing can be said; empty otherwise.
    problem: str = ""

    @property
    def is_flat(self) -> bool:
        """Whether the series was seen often enough, and grew by no more than the limit."""
        return not self.problem and self.growth <= self.limit


def judge(samples: Sequence[Sample]) -> list[Trend]:
    """Return the trend of each series, by name."""
    if not samples:
        raise ValueError("there is no sample: nothing can be said about growth")
    middle = (samples[0].at_s + samples[-1].at_s) / 2
    half = [sample for sample in samples if sample.at_s >= middle]
    names = sorted({name for sample in samples for name in sample.values})
    return [_judge_series(name, half) for name in names]


def _judge_series(name: str, half: Sequence[Sample]) -> Trend:
    limit = LIMITS[name.rpartition(".")[2]]
    points = [(sample.at_s, sample.values[name]) for sample in half if name in sample.values]
    if len(points) < MIN_SAMPLES:
        return Trend(name, len(points), 0, 0, 0, 0, f"{len(points)} samples, at least {MIN_SAMPLES} are needed")
    values = [value for _, value in points]
    median = statistics.median(values)
    growth = find_slope(points) * (points[-1][0] - points[0][0])
    pids = {sample.pids[owner] for sample in half if (owner := name.partition(".")[0]) in sample.pids}
    problem = "another process in the second half, so that growth cannot be seen" if len(pids) > 1 else ""
    return Trend(name, len(points), median, max(values), growth, limit.of(median), problem)


def find_slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the Theil-Sen slope of points with different first coordinates."""
    return statistics.median(
        (later - value) / (end - begin) for (begin, value), (end, later) in combinations(points, 2)
    )


def format_table(trends: Sequence[Trend]) -> str:
    """Return the trends as a table in Markdown."""
    lines = ["| series | median | largest | growth | limit | verdict |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {one.name} | {one.median:.1f} | {one.largest:.1f} | {one.growth:+.1f} | {one.limit:.1f} | {_verdict(one)} |"
        for one in trends
    ]
    return "\n".join(lines)


def _verdict(trend: Trend) -> str:
    return "flat" if trend.is_flat else f"**{trend.problem or 'grows'}**"
