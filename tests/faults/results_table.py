"""`python -m tests.faults.results_table`: writes the results of the catalogue's last runs into docs/reliability.md."""

from __future__ import annotations

import json
from typing import Any

from tests.faults.catalogue import CASES, NOT_RUN
from tests.support.product import ROOT

RESULTS = ROOT / ".cache" / "faults" / "results.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table: python -m tests.faults.results_table -->", "<!-- end of the table -->"


def main() -> None:
    """Replace the table on the page."""
    results = json.loads(RESULTS.read_text())
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    PAGE.write_text(f"{head}{BEGIN}\n{build(results)}\n{END}{tail}", encoding="utf-8")


def build(results: dict[str, dict[str, Any]]) -> str:
    """Build the table in Markdown, in the catalogue's order."""
    lines = [
        "| case | fault | how it is injected | where | expected result | outcome | date | repeats |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {case.id} | {case.title} | {_cell(case.how)} | {case.where} | {_cell(case.expect)} | "
        f"{_outcome(results.get(case.id))} |"
        for case in CASES
    ]
    lines += ["", "Not run, or only in part:", "", "| case | fault | why |", "|---|---|---|"]
    lines += [f"| {omitted.id} | {omitted.title} | {_cell(omitted.why)} |" for omitted in NOT_RUN]
    return "\n".join(lines)


def _outcome(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run yet | – | 0"
    runs, passed = result["runs"], result["passed"]
    text = "holds" if passed == runs else f"**{runs - passed} of {runs} failed**"
    figures = ", ".join(f"{name} {value:g}" for name, value in sorted(result["figures"].items()))
    return f"{text}{f' ({figures})' if figures else ''} | {result['date']} | {runs}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
