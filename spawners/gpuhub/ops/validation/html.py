"""The report as one HTML file that needs no other file, for phones and desktops, in light and dark."""

from __future__ import annotations

from pathlib import Path

from gpuhub.common.units import format_span
from gpuhub.ops.validation.report import (
    Report,
    describe_hardware,
    describe_node,
    describe_outcomes,
    format_figure,
)
from gpuhub.web.template_loader import build_strict_environment


def render_report(report: Report, comparison: str = "") -> str:
    """Return the page; `comparison` is the text of the comparison with an earlier report."""
    environment = build_strict_environment(Path(__file__).parent)
    environment.filters["span"] = format_span
    environment.filters["figure"] = format_figure
    environment.filters["node"] = describe_node
    return environment.get_template("report.html").render(
        report=report,
        hardware=describe_hardware(report),
        summary=describe_outcomes(report.checks),
        comparison=comparison,
    )
