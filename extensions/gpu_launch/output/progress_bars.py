"""Progress of the ranks: reported by scripts, or drawn by tqdm."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Maximum number of bars shown of one rank, such as nested loops.
_MAX_BARS = 3
#: Number of reports from which the remaining time is estimated.
_MAX_REPORTS = 60
_MAX_METRICS = 8

#: `train:  45%|████▌     | 45/100 [00:12<00:15, 3.60it/s, loss=0.3]`
_WITH_TOTAL = re.compile(
    r"(?P<text>[^|]*?)(?:: *| +|)(?P<percent>\d{1,3})%\|[^|]*\| *"
    r"(?P<step>[\d.]+[kMGTPEZY]?)/(?P<total>[\d.]+[kMGTPEZY]?)[^\[\]]{0,20}? "
    r"\[(?P<elapsed>[\d:.]+|\?)<(?P<left>[\d:]+|\?)(?P<rest>(?:[^\[\]]|\[[^\[\]]*\])*)\]"
)
#: `123it [00:12, 9.10it/s]`: the total is unknown.
_WITHOUT_TOTAL = re.compile(
    r"(?P<text>[^|\[\]]*?)(?:: *|)(?P<step>[\d.]+[kMGTPEZY]?)(?P<unit>[A-Za-z]{1,12}) "
    r"\[(?P<elapsed>\d\d:[\d:]+)(?P<rest>, (?:[^\[\]]|\[[^\[\]]*\])*)\]"
)
_SCALES = {scale: 1000.0 ** (power + 1) for power, scale in enumerate("kMGTPEZY")}


@dataclass(frozen=True, kw_only=True)
class ProgressBar:
    """Progress of one loop of a rank."""

    #: The script's description; may be empty.
    text: str = ""
    step: float
    #: None if unknown.
    total: float | None = None
    #: Seconds; None if unknown.
    remaining_s: float | None = None
    #: The rate, the loss and other figures.
    note: str = ""

    @property
    def is_complete(self) -> bool:
        return self.total is not None and self.step >= self.total

    @property
    def fraction(self) -> float | None:
        """Return the progress from 0 to 1."""
        return None if not self.total else min(1.0, max(0.0, self.step / self.total))


def parse_bar(line: str) -> tuple[ProgressBar, str] | None:
    """Parse tqdm's drawing at the beginning of a line; return the bar and the rest of the line, or None."""
    if "%|" in line:
        match = _WITH_TOTAL.match(line)
    elif " [" in line and ("/s" in line or "s/" in line):
        match = _WITHOUT_TOTAL.match(line)
    else:
        return None
    if match is None:
        return None
    parts = match.groupdict()
    bar = ProgressBar(
        text=parts["text"].strip(),
        step=_parse_number(parts["step"]),
        total=_parse_number(parts["total"]) if "total" in parts else None,
        remaining_s=_parse_seconds(parts.get("left") or "?"),
        note=" · ".join(part.strip() for part in parts["rest"].split(", ") if part.strip() and "?" not in part),
    )
    return bar, line[match.end() :]


def _parse_number(text: str) -> float:
    """Parse numbers such as `1.20k` that tqdm shortens."""
    scale = _SCALES.get(text[-1], 1.0)
    try:
        return float(text.rstrip("kMGTPEZY")) * scale
    except ValueError:
        return 0.0


def _parse_seconds(text: str) -> float | None:
    """Parse `1:02:03` or `02:03`."""
    parts = text.split(":")
    if not all(part.isdecimal() for part in parts):
        return None
    seconds = 0.0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return seconds


@dataclass
class _RankProgress:
    #: Drawn bars by their totals, the latest one last: descriptions often change with every step.
    drawn: dict[float | None, ProgressBar] = field(default_factory=dict)
    #: The number of bars that were drawn before the first drawing of one, by its total.
    places: dict[float | None, int] = field(default_factory=dict)
    reported: ProgressBar | None = None
    #: Time and step of each report.
    times: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MAX_REPORTS))


class ProgressTracker:
    """Keeps the progress of every rank."""

    def __init__(self) -> None:
        self._ranks: dict[int, _RankProgress] = {}
        self._redrawn: set[int] = set()

    def clear(self) -> None:
        """Forget all progress, before the ranks start again."""
        self._ranks.clear()
        self._redrawn.clear()

    def record_bar(self, rank: int, bar: ProgressBar) -> None:
        """Record a bar that a rank has drawn."""
        progress = self._ranks.setdefault(rank, _RankProgress())
        progress.drawn.pop(bar.total, None)
        progress.drawn[bar.total] = bar
        progress.places.setdefault(bar.total, len(progress.places))
        self._redrawn.add(rank)

    def pop_redrawn(self) -> dict[int, tuple[ProgressBar, ...]]:
        """Return the bars of each rank that has drawn one since the last call: the last ones, outer loops first."""
        redrawn, self._redrawn = sorted(self._redrawn), set()
        return {rank: self._order_bars(rank) for rank in redrawn}

    def _order_bars(self, rank: int) -> tuple[ProgressBar, ...]:
        bars = list(self._ranks[rank].drawn.values())[-_MAX_BARS:]
        # The outer of two loops is drawn again when the inner one has ended.
        return tuple(sorted(bars, key=lambda bar: self._ranks[rank].places[bar.total]))

    def record_report(self, rank: int, report: Mapping[str, Any], now: float) -> None:
        """Record a `gpu_launch.report` of a rank; values that are not numbers are left out."""
        step, total = _parse_figure(report.get("step")), _parse_figure(report.get("total"))
        if step is None:
            return
        progress = self._ranks.setdefault(rank, _RankProgress())
        if progress.times and step < progress.times[-1][1]:
            progress.times.clear()
        progress.times.append((now, step))
        metrics = report.get("metrics")
        metrics = metrics if isinstance(metrics, Mapping) else {}
        progress.reported = ProgressBar(
            text=str(report.get("text") or ""),
            step=step,
            total=total,
            remaining_s=_estimate_remaining(progress.times, total),
            note=" · ".join(f"{name} {_format_metric(value)}" for name, value in list(metrics.items())[:_MAX_METRICS]),
        )

    def bars(self) -> tuple[ProgressBar, ...]:
        """Return the bars to show: the lowest rank's own report, or the bars that it draws."""
        for _, rank in sorted(self._ranks.items()):
            if rank.reported is not None:
                return (rank.reported,)
        for _, rank in sorted(self._ranks.items()):
            unfinished = [bar for bar in rank.drawn.values() if not bar.is_complete]
            return tuple((unfinished or list(rank.drawn.values())[-1:])[-_MAX_BARS:])
        return ()


def _parse_figure(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e18 else None  # type: ignore[arg-type]


def _estimate_remaining(times: deque[tuple[float, float]], total: float | None) -> float | None:
    (first_at, first), (last_at, last) = times[0], times[-1]
    if total is None or last <= first or last_at <= first_at:
        return 0.0 if total is not None and last >= total else None
    return max(0.0, total - last) * (last_at - first_at) / (last - first)


def _format_metric(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]
