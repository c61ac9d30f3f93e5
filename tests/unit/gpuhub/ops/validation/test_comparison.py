"""What got worse since an earlier report."""

from __future__ import annotations

from gpuhub.ops.validation.comparison import compare_reports, format_comparison
from gpuhub.ops.validation.report import Figure, Report
from tests.support.validation import build_report


def change_figures(report: Report, **values: float) -> Report:
    """Return the report with other values of figures, by the last word of their names."""

    def change(figure: Figure) -> Figure:
        return figure.model_copy(update={"value": values.get(figure.name.rpartition(".")[2], figure.value)})

    parts = [part.model_copy(update={"figures": tuple(map(change, part.figures))}) for part in report.parts]
    return report.model_copy(update={"parts": tuple(parts)})


def test_same_figures_are_not_worse() -> None:
    before = build_report()
    assert compare_reports(before, before) == []
    assert format_comparison([], before) == (
        "Compared with 2026-03-14 10:15 UTC, gpuhub 0.2.0: nothing got worse by more than 5%"
    )


def test_only_more_than_the_tolerance_counts() -> None:
    """4 % less bandwidth is noise, 10 % is not; more bandwidth and a shorter round trip are no loss."""
    before = build_report(bandwidth=10.0)
    assert compare_reports(build_report(bandwidth=9.6), before) == []
    assert compare_reports(build_report(bandwidth=9.0), before) == [
        "network.rig1-rig2.bandwidth: 9 Gbit/s, was 10 Gbit/s (10% worse)"
    ]
    assert compare_reports(change_figures(before, bandwidth=20.0, round_trip=0.1), before) == []


def test_longer_round_trip_is_worse() -> None:
    assert compare_reports(change_figures(build_report(), round_trip=0.3), build_report()) == [
        "network.rig1-rig2.round_trip: 0.3 ms, was 0.2 ms (50% worse)"
    ]


def test_new_failure_and_missing_node_are_named() -> None:
    now = build_report(has_failed=True)
    now = now.model_copy(update={"nodes": now.nodes[:1]})
    lines = compare_reports(now, build_report())
    assert lines == [
        "rig2 took part then, and did not this time",
        "all: GPUs are free fails; it did not then",
    ]
    assert format_comparison(lines, build_report()).splitlines()[1] == f"  {lines[0]}"


def test_figure_that_was_not_measured_is_named() -> None:
    now = build_report()
    now = now.model_copy(update={"parts": now.parts[:1]})
    assert "network.rig1-rig2.bandwidth was 2.3 Gbit/s, and was not measured this time" in compare_reports(
        now, build_report()
    )


def test_simulated_and_real_gpus_are_told_apart() -> None:
    [line] = compare_reports(build_report(is_simulated=True), build_report())
    assert line.startswith("the GPUs are simulated")
