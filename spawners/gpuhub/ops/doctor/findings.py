"""Findings of checks, and their formats for people and programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


_MARKS = {Severity.OK: "✓", Severity.WARNING: "!", Severity.FAILED: "✗"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    #: The subject in a word or two, such as `clock`.
    check: str
    severity: Severity
    #: The observation, such as `0.1 s ahead of the head node`.
    value: str
    #: The remedy; empty where none is needed.
    advice: str = ""


def ok(check: str, value: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(check=check, severity=Severity.OK, value=value)


def warning(check: str, value: str, advice: str = "") -> Finding:
    """Return a finding that the administrator should know, although it works."""
    return Finding(check=check, severity=Severity.WARNING, value=value, advice=advice)


def failed(check: str, value: str, advice: str) -> Finding:
    """Return a finding of something that does not work; `advice` is the remedy."""
    return Finding(check=check, severity=Severity.FAILED, value=value, advice=advice)


def has_failed(findings: Iterable[Finding]) -> bool:
    """Return whether any of the findings is a failure."""
    return any(finding.severity is Severity.FAILED for finding in findings)


def format_findings(findings: Sequence[Finding], width: int | None = None) -> str:
    """Return a line for each finding with its remedy below, wrapped to `width` unless it is None."""
    label = max((len(finding.check) for finding in findings), default=0)
    indent = " " * (label + 5)
    lines = []
    for finding in findings:
        lines += wrap_text(f"  {_MARKS[finding.severity]} {finding.check:<{label}} {finding.value}", indent, width)
        if finding.advice and finding.severity is not Severity.OK:
            lines += wrap_text(f"{indent}→ {finding.advice}", f"{indent}  ", width)
    return "\n".join(lines)


def wrap_text(text: str, indent: str, width: int | None) -> list[str]:
    """Return a text as lines of at most `width` columns, all except the first with the indent; as it is for None."""
    if width is None or width <= len(indent) + 20:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def build_json(machines: Iterable[tuple[str, Sequence[Finding]]]) -> list[dict[str, Any]]:
    """Return the value that `gpuhub doctor --json` writes: the findings of each machine."""
    return [
        {
            "machine": name,
            "findings": [
                {
                    "check": finding.check,
                    "level": finding.severity.value,
                    "value": finding.value,
                    "advice": finding.advice,
                }
                for finding in findings
            ],
        }
        for name, findings in machines
    ]
