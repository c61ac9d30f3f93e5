"""The section of the page of GPUs that shows what was used: a chart by day, and the last jobs and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from gpuhub.broker_api.schemas import CostView, ReportRow, ReportView
from gpuhub.web.template_loader import load_macros

#: Size of the chart in units of its own, and the space for its labels.
WIDTH, HEIGHT, LEFT, BOTTOM = 720.0, 150.0, 52.0, 20.0
_TOP = 8.0
#: Part of a day's width that its bar has.
_BAR = 0.8
#: Jobs and notebooks that are listed.
MAX_RECORDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartBar:
    """The bar of a day."""

    day: str
    x: float
    y: float
    width: float
    height: float
    row: ReportRow | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostChart:
    """GPU-hours by day."""

    bars: Sequence[ChartBar]
    #: Height of the axis in GPU-hours.
    top: float
    #: Sums of the whole time, one for each currency.
    total: Sequence[ReportRow]

    @property
    def used_days(self) -> list[ReportRow]:
        """Return the days on which GPUs were used."""
        return [bar.row for bar in self.bars if bar.row is not None]


def build_chart(report: ReportView) -> CostChart:
    """Return the chart of a report by day; days in several currencies have one bar."""
    rows: dict[str, ReportRow] = {}
    for row in report.rows:
        known = rows.get(row.key)
        rows[row.key] = row if known is None else row.model_copy(update={"gpu_hours": row.gpu_hours + known.gpu_hours})
    first, last = date.fromisoformat(report.since), date.fromisoformat(report.until)
    days = [(first + timedelta(days=number)).isoformat() for number in range((last - first).days + 1)]
    top = find_axis_top(max((row.gpu_hours for row in rows.values()), default=0.0))
    step = (WIDTH - LEFT) / len(days)
    bars = []
    for number, day in enumerate(days):
        found = rows.get(day)
        height = 0.0 if found is None else (HEIGHT - BOTTOM - _TOP) * found.gpu_hours / top
        bars.append(
            ChartBar(
                day=day,
                x=round(LEFT + number * step + step * (1 - _BAR) / 2, 1),
                y=round(HEIGHT - BOTTOM - height, 1),
                width=round(step * _BAR, 1),
                height=round(height, 1),
                row=found,
            )
        )
    return CostChart(bars=bars, top=top, total=report.total)


def find_axis_top(highest: float) -> float:
    """Return a round number that is not below the highest bar: 1, 2 or 5 times a power of ten."""
    unit = 0.001
    while True:
        for factor in (1, 2, 5):
            if factor * unit >= highest:
                return factor * unit
        unit *= 10


def render_costs(report: ReportView, records: Sequence[CostView], name: str) -> str:
    """Render the section for a user; empty if nothing was used."""
    if not report.rows and not records:
        return ""
    macros = load_macros("gpuhub_costs.html")
    return str(macros.costs(build_chart(report), records, name, report))
