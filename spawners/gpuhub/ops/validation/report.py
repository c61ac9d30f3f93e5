"""The report of a validation as frozen values and as JSON, and its text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from gpuhub.common.errors import InvalidRequest
from gpuhub.common.units import format_span
from gpuhub.ops.doctor.findings import wrap_text

#: Version of the JSON's form.
FORMAT = 1


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Outcome(StrEnum):
    """Result of a check."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    #: Observed, without a goal that it must reach.
    INFO = "info"


class Check(_Value):
    """One thing that was checked."""

    #: The subject, such as `rig1: visible GPUs`.
    name: str
    outcome: Outcome
    #: What was seen.
    seen: str
    #: What should have been seen, and what to check next; of a failed check only.
    expected: str = ""
    advice: str = ""


class Better(StrEnum):
    """The direction in which a figure improves."""

    HIGHER = "higher"
    LOWER = "lower"


class Figure(_Value):
    """A measured number that reports can be compared by."""

    #: Such as `network.rig1-rig2.bandwidth`.
    name: str
    value: float
    #: Unit of the value; empty for a ratio.
    unit: str
    better: Better


class Part(_Value):
    """One part of the validation."""

    #: `closet`, `one-each`, `all-at-once`, `hello`, `ddp` or `afterwards`.
    name: str
    title: str
    duration_s: float
    checks: tuple[Check, ...]
    figures: tuple[Figure, ...] = ()


class ReportedGpu(_Value):
    """A GPU that took part."""

    uuid: str
    model: str
    memory_mib: int


class ReportedNode(_Value):
    """A node that took part."""

    name: str
    #: Version of NVIDIA's driver; None where it is not known.
    driver: str | None
    gpus: tuple[ReportedGpu, ...]


class Report(_Value):
    """All that one validation saw."""

    format: int = FORMAT
    #: Version of gpuhub.
    gpuhub: str
    started_at: datetime
    duration_s: float
    #: The user whose jobs ran.
    user: str
    #: Whether the GPUs are those of the practice closet; None if no job reported it.
    is_simulated: bool | None
    nodes: tuple[ReportedNode, ...]
    parts: tuple[Part, ...]

    @property
    def has_failed(self) -> bool:
        """Whether any check failed."""
        return bool(self.failed_names)

    @property
    def failed_names(self) -> tuple[str, ...]:
        """The names of the checks that failed."""
        return tuple(check.name for check in self.checks if check.outcome is Outcome.FAIL)

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks of all parts."""
        return tuple(check for part in self.parts for check in part.checks)

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The figures of all parts."""
        return tuple(figure for part in self.parts for figure in part.figures)


def passed(name: str, seen: str) -> Check:
    """Return a check that holds."""
    return Check(name=name, outcome=Outcome.PASS, seen=seen)


def failed(name: str, seen: str, *, expected: str, advice: str) -> Check:
    """Return a check that does not hold; `advice` says what to check next."""
    return Check(name=name, outcome=Outcome.FAIL, seen=seen, expected=expected, advice=advice)


def info(name: str, seen: str) -> Check:
    """Return an observation without a goal."""
    return Check(name=name, outcome=Outcome.INFO, seen=seen)


def build_check(name: str, *, holds: bool, seen: str, expected: str, advice: str) -> Check:
    """Return a check that passes if it holds, and otherwise has what was expected and what to check next."""
    return passed(name, seen) if holds else failed(name, seen, expected=expected, advice=advice)


def load_report(file: Path) -> Report:
    """Read a report that `--json` wrote.

    Raises:
        InvalidRequest: It cannot be read, or is no such report.
    """
    try:
        report = Report.model_validate_json(file.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        text = f"{file} is not a report of `gpuhub validate --json`: {error.errors()[0]['msg']}"
        raise InvalidRequest(text) from error
    if report.format != FORMAT:
        raise InvalidRequest(f"{file} has form {report.format} of the report, but this gpuhub reads form {FORMAT}")
    return report


def describe_hardware(report: Report) -> str:
    """Return in one phrase whether the GPUs are real."""
    if report.is_simulated is None:
        return "unknown: no job reported it"
    return "simulated: programs compute on the CPU" if report.is_simulated else "real"


def describe_node(node: ReportedNode) -> str:
    """Return a node's GPUs and driver: `2 × RTX 5090, driver 570.86`."""
    models = Counter(gpu.model for gpu in node.gpus)
    gpus = ", ".join(f"{count} × {model}" for model, count in models.items()) or "no GPU"
    return f"{gpus}, driver {node.driver or 'unknown'}"


def describe_outcomes(checks: Iterable[Check]) -> str:
    """Return how many checks had each result: `12 passed, 1 failed, 2 for information`."""
    counts = Counter(check.outcome for check in checks)
    return f"{counts[Outcome.PASS]} passed, {counts[Outcome.FAIL]} failed, {counts[Outcome.INFO]} for information"


def format_figure(figure: Figure) -> str:
    """Return a figure's value with its unit."""
    return f"{figure.value:.3g} {figure.unit}".rstrip()


def format_report(report: Report, width: int | None = None) -> str:
    """Return the report for a terminal, wrapped to `width` unless it is None."""
    lines = [
        f"gpuhub {report.gpuhub}, {report.started_at:%Y-%m-%d %H:%M %Z}, as {report.user}",
        f"GPUs: {describe_hardware(report)}",
        *(f"{node.name}: {describe_node(node)}" for node in report.nodes),
    ]
    for part in report.parts:
        lines += ["", f"{part.name}: {part.title} ({format_span(part.duration_s)})"]
        label = max((len(check.name) for check in part.checks), default=0)
        indent = " " * (label + 10)
        for check in part.checks:
            lines += wrap_text(f"  {check.outcome:<4}  {check.name:<{label}}  {check.seen}", indent, width)
            if check.outcome is Outcome.FAIL:
                lines += wrap_text(f"{indent}expected: {check.expected}", f"{indent}  ", width)
                lines += wrap_text(f"{indent}→ {check.advice}", f"{indent}  ", width)
    lines += ["", f"{describe_outcomes(report.checks)}, in {format_span(report.duration_s)}"]
    return "\n".join([*lines, *(f"  failed: {name}" for name in report.failed_names)])
