"""Comparison of a report with an earlier one: what got worse by more than the tolerance."""

from __future__ import annotations

from collections.abc import Iterable

from gpuhub.ops.validation.report import Better, Figure, Outcome, Report, describe_hardware, format_figure

#: Changes up to this share of the earlier value are noise.
TOLERANCE = 0.05


def compare_reports(now: Report, before: Report) -> list[str]:
    """Return a line for everything that got worse, is missing, or makes the reports hard to compare."""
    return [*_list_differences(now, before), *_list_failures(now, before), *_list_worse(now.figures, before.figures)]


def format_comparison(lines: list[str], before: Report) -> str:
    """Return the comparison as text."""
    head = f"Compared with {before.started_at:%Y-%m-%d %H:%M %Z}, gpuhub {before.gpuhub}"
    if not lines:
        return f"{head}: nothing got worse by more than {TOLERANCE:.0%}"
    return "\n".join([f"{head}:", *(f"  {line}" for line in lines)])


def _list_differences(now: Report, before: Report) -> list[str]:
    lines = []
    if now.is_simulated != before.is_simulated:
        lines.append(
            f"the GPUs are {describe_hardware(now)}; they were {describe_hardware(before)}, so figures differ anyway"
        )
    names = {node.name for node in now.nodes}
    gone = [node.name for node in before.nodes if node.name not in names]
    return [*lines, *(f"{name} took part then, and did not this time" for name in gone)]


def _list_failures(now: Report, before: Report) -> list[str]:
    passed = {check.name for check in before.checks if check.outcome is not Outcome.FAIL}
    return [
        f"{check.name} fails; it did not then"
        for check in now.checks
        if check.outcome is Outcome.FAIL and check.name in passed
    ]


def _list_worse(now: Iterable[Figure], before: Iterable[Figure]) -> list[str]:
    current, lines = {figure.name: figure for figure in now}, []
    for old in before:
        figure = current.get(old.name)
        if figure is None:
            lines.append(f"{old.name} was {format_figure(old)}, and was not measured this time")
        elif (loss := _find_loss(figure, old)) > TOLERANCE:
            lines.append(f"{old.name}: {format_figure(figure)}, was {format_figure(old)} ({loss:.0%} worse)")
    return lines


def _find_loss(figure: Figure, old: Figure) -> float:
    """Return by which share of the earlier value a figure got worse; negative if it got better."""
    if old.value == 0:
        return 0.0
    change = (figure.value - old.value) / abs(old.value)
    return -change if figure.better is Better.HIGHER else change
