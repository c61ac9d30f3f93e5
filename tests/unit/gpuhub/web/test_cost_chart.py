"""The chart of GPU-hours, and the section around it."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from gpuhub.broker_api.schemas import CostView, Purpose, ReportDimension, ReportRow, ReportView
from gpuhub.web.cost_chart import build_chart, find_axis_top, render_costs

NASTY = '<script>alert("x")</script>'


def build_row(key: str, hours: float, currency: str = "EUR") -> ReportRow:
    return ReportRow(
        key=key, gpu_hours=hours, busy_percent=31.0, peak_memory_mib=9216, energy_kwh=0.42, is_energy_estimated=False,
        cost=1.5, currency=currency,
    )  # fmt: skip


def build_report(*rows: ReportRow, owner: str | None = "ada") -> ReportView:
    return ReportView(
        by=ReportDimension.DAY, since="2026-11-01", until="2026-11-10", owner=owner, rows=rows,
        total=[build_row("total", sum(row.gpu_hours for row in rows))],
    )  # fmt: skip


def build_record(**changes: object) -> CostView:
    record = CostView(
        id="j1", owner="ada", purpose=Purpose.JOB, name="train.py", model="RTX 5090", gpu_count=1,
        started_at=datetime(2026, 11, 9, tzinfo=UTC), ended_at=None, gpu_hours=1.0, busy_percent=31.0,
        peak_memory_mib=9216, memory_mib=32607, energy_kwh=0.42, is_energy_estimated=False, cost=0.18, currency="EUR",
        smaller_gpu="RTX 5060", text="GPU 31 % busy; an RTX 5060 would have been enough",
    )  # fmt: skip
    return record.model_copy(update=changes)


@pytest.mark.parametrize(("highest", "top"), [(0.0, 0.001), (0.3, 0.5), (1.0, 1.0), (14.0, 20.0), (900.0, 1000.0)])
def test_axis_ends_at_a_round_number(highest: float, top: float) -> None:
    assert find_axis_top(highest) == pytest.approx(top)


def test_bars_are_in_proportion_and_inside() -> None:
    """One place for each day, a bar where GPUs were used; two currencies of a day have one bar."""
    rows = build_row("2026-11-02", 1.0), build_row("2026-11-02", 1.0, "USD"), build_row("2026-11-10", 4.0)
    chart = build_chart(build_report(*rows))
    assert (len(chart.bars), len(chart.used_days)) == (10, 2)
    low, high = chart.bars[1], chart.bars[9]
    assert high.height == pytest.approx(2 * low.height, abs=0.2)
    assert all(bar.x >= 44 and bar.x + bar.width <= 720 and 8 <= bar.y <= 130 for bar in chart.bars)


def test_section_has_the_figures_as_text_too() -> None:
    """Title and description for screen readers, a table with a header for each day, lines of jobs; names are escaped."""
    html = render_costs(build_report(build_row("2026-11-02", 1.25)), [build_record(name=NASTY)], "ada")
    assert re.search(r'role="img" aria-labelledby="gpuhub-chart-title gpuhub-chart-text"', html)
    assert "<title>2026-11-02: 1.2 GPU-hours, 31 % busy, 0.42 kWh, 1.50 EUR</title>" in html
    assert '<th scope="row">2026-11-02</th>' in html
    assert "an RTX 5060 would have been enough" in html
    assert "so far, since" in html
    assert NASTY not in html
    assert "Used by you" in html


def test_administrators_see_whose_it_is() -> None:
    html = render_costs(build_report(build_row("2026-11-02", 1.0), owner=None), [build_record(owner="ben")], "root")
    assert "Used by all" in html
    assert "of ben:" in " ".join(html.split())


def test_nothing_is_shown_before_the_first_use() -> None:
    assert render_costs(build_report(), [], "ada") == ""
