"""What a look at a machine came to, line by line, for a person or a program. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How good a finding is."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


_SIGNS = {Level.OK: "✓", Level.WARNING: "!", Level.FAILED: "✗"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    #: What, in a word or two, such as `clock`.
    check: str
    level: Level
    #: What was found, such as `0.1 s ahead of the head node`.
    value: str
    #: What to do about it; empty where nothing is to be done.
    advice: str = ""


def ok(check: str, value: str) -> Finding:
    """As it should be."""
    return Finding(check=check, level=Level.OK, value=value)


def warning(check: str, value: str, advice: str = "") -> Finding:
    """It works, but should be known."""
    return Finding(check=check, level=Level.WARNING, value=value, advice=advice)


def failed(check: str, value: str, advice: str) -> Finding:
    """It does not work; `advice` says what to do."""
    return Finding(check=check, level=Level.FAILED, value=value, advice=advice)


def has_failed(findings: Iterable[Finding]) -> bool:
    """Whether any of them does not work."""
    return any(finding.level is Level.FAILED for finding in findings)


def format_findings(findings: Sequence[Finding], width: int | None = None) -> str:
    """A line each, with what to do below; `width` is the terminal's, None where nothing is to be wrapped."""
    label = max((len(finding.check) for finding in findings), default=0)
    indent = " " * (label + 5)
    lines = []
    for finding in findings:
        lines += _wrap(f"  {_SIGNS[finding.level]} {finding.check:<{label}} {finding.value}", indent, width)
        if finding.advice and finding.level is not Level.OK:
            lines += _wrap(f"{indent}→ {finding.advice}", f"{indent}  ", width)
    return "\n".join(lines)


def _wrap(text: str, indent: str, width: int | None) -> list[str]:
    if width is None or width <= len(indent) + 20:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def as_json(machines: Iterable[tuple[str, Sequence[Finding]]]) -> list[dict[str, Any]]:
    """Machine by machine, for `gpuhub doctor --json`."""
    return [
        {
            "machine": name,
            "findings": [
                {"check": each.check, "level": each.level.value, "value": each.value, "advice": each.advice}
                for each in findings
            ],
        }
        for name, findings in machines
    ]
