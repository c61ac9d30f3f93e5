"""How far the ranks are: what scripts report, and what tqdm draws. Pure: time is passed in."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Bars of one rank that are shown: of loops in loops, say.
_MOST_BARS = 3
#: Reports from which the time that is left is estimated.
_REPORTS = 60
_MOST_METRICS = 8

#: `train:  45%|████▌     | 45/100 [00:12<00:15, 3.60it/s, loss=0.3]`
_OF_TOTAL = re.compile(
    r"(?P<text>[^|]*?)(?:: *| +|)(?P<percent>\d{1,3})%\|[^|]*\| *"
    r"(?P<step>[\d.]+[kMGTPEZY]?)/(?P<total>[\d.]+[kMGTPEZY]?)[^\[\]]{0,20}? "
    r"\[(?P<elapsed>[\d:.]+|\?)<(?P<left>[\d:]+|\?)(?P<rest>(?:[^\[\]]|\[[^\[\]]*\])*)\]"
)
#: `123it [00:12, 9.10it/s]`: no total is known.
_OPEN = re.compile(
    r"(?P<text>[^|\[\]]*?)(?:: *|)(?P<step>[\d.]+[kMGTPEZY]?)(?P<unit>[A-Za-z]{1,12}) "
    r"\[(?P<elapsed>\d\d:[\d:]+)(?P<rest>, (?:[^\[\]]|\[[^\[\]]*\])*)\]"
)
_SCALES = {scale: 1000.0 ** (power + 1) for power, scale in enumerate("kMGTPEZY")}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """How far one loop of a rank is."""

    #: What it is, in the script's words; may be empty.
    text: str = ""
    step: float
    #: None where no end is known.
    total: float | None = None
    #: Seconds; None where not known.
    left_s: float | None = None
    #: The rate, the loss, whatever else is told.
    note: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether it is at its end."""
        return self.total is not None and self.step >= self.total

    @property
    def part(self) -> float | None:
        """From 0 to 1."""
        return None if not self.total else min(1.0, max(0.0, self.step / self.total))


def find_bar(line: str) -> tuple[Bar, str] | None:
    """tqdm's drawing at the beginning of a line, and what follows it; None where there is none."""
    if "%|" in line:
        found = _OF_TOTAL.match(line)
    elif " [" in line and ("/s" in line or "s/" in line):
        found = _OPEN.match(line)
    else:
        return None
    if found is None:
        return None
    parts = found.groupdict()
    bar = Bar(
        text=parts["text"].strip(),
        step=_number(parts["step"]),
        total=_number(parts["total"]) if "total" in parts else None,
        left_s=_seconds(parts.get("left") or "?"),
        note=" · ".join(part.strip() for part in parts["rest"].split(", ") if part.strip() and "?" not in part),
    )
    return bar, line[found.end() :]


def _number(text: str) -> float:
    """`1.20k`: tqdm's way of writing large numbers."""
    scale = _SCALES.get(text[-1], 1.0)
    try:
        return float(text.rstrip("kMGTPEZY")) * scale
    except ValueError:
        return 0.0


def _seconds(text: str) -> float | None:
    """`1:02:03` or `02:03`."""
    parts = text.split(":")
    if not all(part.isdecimal() for part in parts):
        return None
    seconds = 0.0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return seconds


@dataclass
class _Rank:
    #: Drawn bars by their totals, the one that changed last at the end: descriptions often change with every step.
    drawn: dict[float | None, Bar] = field(default_factory=dict)
    reported: Bar | None = None
    #: When which step was reported.
    times: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_REPORTS))


class Steps:
    """Every rank's progress."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}

    def clear(self) -> None:
        """The ranks start again."""
        self._ranks.clear()

    def draw(self, rank: int, bar: Bar) -> None:
        """A rank has drawn a bar."""
        drawn = self._ranks.setdefault(rank, _Rank()).drawn
        drawn.pop(bar.total, None)
        drawn[bar.total] = bar

    def report(self, rank: int, told: Mapping[str, Any], now: float) -> None:
        """A rank has told its progress with `gpu_launch.report`; what is no number is left out."""
        step, total = _figure(told.get("step")), _figure(told.get("total"))
        if step is None:
            return
        known = self._ranks.setdefault(rank, _Rank())
        if known.times and step < known.times[-1][1]:
            known.times.clear()
        known.times.append((now, step))
        metrics = told.get("metrics")
        metrics = metrics if isinstance(metrics, Mapping) else {}
        known.reported = Bar(
            text=str(told.get("text") or ""),
            step=step,
            total=total,
            left_s=_estimate(known.times, total),
            note=" · ".join(f"{name} {_short(value)}" for name, value in list(metrics.items())[:_MOST_METRICS]),
        )

    def bars(self) -> tuple[Bar, ...]:
        """What is shown: the lowest rank's own report, or the bars that it draws."""
        for _, rank in sorted(self._ranks.items()):
            if rank.reported is not None:
                return (rank.reported,)
        for _, rank in sorted(self._ranks.items()):
            going = [bar for bar in rank.drawn.values() if not bar.is_complete]
            return tuple((going or list(rank.drawn.values())[-1:])[-_MOST_BARS:])
        return ()


def _figure(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e18 else None  # type: ignore[arg-type]


def _estimate(times: deque[tuple[float, float]], total: float | None) -> float | None:
    (first_at, first), (last_at, last) = times[0], times[-1]
    if total is None or last <= first or last_at <= first_at:
        return 0.0 if total is not None and last >= total else None
    return max(0.0, total - last) * (last_at - first_at) / (last - first)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]
