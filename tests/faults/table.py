"""`python -m tests.faults.table`: what the last runs of the catalogue came to, written into docs/reliability.md."""

from __future__ import annotations

import json
from typing import Any

from tests.faults.catalogue import CASES, NOT_RUN
from tests.support.product import ROOT

RESULTS = ROOT / ".cache" / "faults" / "results.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table: python -m tests.faults.table -->", "<!-- end of the table -->"


def main() -> None:
    """Put the table of the results into the page."""
    results = json.loads(RESULTS.read_text())
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    PAGE.write_text(f"{head}{BEGIN}\n{build(results)}\n{END}{tail}", encoding="utf-8")


def build(results: dict[str, dict[str, Any]]) -> str:
    """The table in Markdown, in the catalogue's order."""
    lines = [
        "| case | fault | injected how | what must come of it | outcome | date | repeats |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {case.id} | {case.title} | {_cell(case.how)} | {_cell(case.expect)} | {_outcome(results.get(case.id))} |"
        for case in CASES
    ]
    lines += ["", "Not run, or not in full:", "", "| case | fault | why |", "|---|---|---|"]
    lines += [f"| {one.id} | {one.title} | {_cell(one.why)} |" for one in NOT_RUN]
    return "\n".join(lines)


def _outcome(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run yet | – | 0"
    runs, passed = result["runs"], result["passed"]
    what = "holds" if passed == runs else f"**{runs - passed} of {runs} failed**"
    figures = ", ".join(f"{name} {value:g}" for name, value in sorted(result["figures"].items()))
    return f"{what}{f' ({figures})' if figures else ''} | {result['date']} | {runs}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
