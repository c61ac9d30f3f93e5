"""The report: its text and its page as people see them, and its JSON as later commands read it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuhub.common.errors import InvalidRequest
from gpuhub.ops.validation.html import render_report
from gpuhub.ops.validation.report import format_report, load_report
from tests.support.golden import check_golden
from tests.support.validation import build_report

GOLDEN = Path(__file__).with_name("golden")


def test_text() -> None:
    """A failed check has what was expected and what to look at."""
    check_golden(format_report(build_report(has_failed=True)) + "\n", GOLDEN / "report.txt")


def test_narrow_terminal() -> None:
    """Long lines are wrapped below their own column."""
    text = format_report(build_report(has_failed=True), width=72)
    assert all(len(line) <= 72 for line in text.splitlines())


def test_page() -> None:
    page = render_report(build_report(has_failed=True), "Compared with last year:\n  <everything> is slower")
    check_golden(page, GOLDEN / "report.html")


def test_page_needs_no_other_file() -> None:
    """Nothing is loaded from anywhere, and text is escaped."""
    page = render_report(build_report(), "<script>")
    assert not re.search(r"(?:src|href|url)\s*[=(]|<script", page)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_json_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(build_report().model_dump_json(indent=2))
    assert load_report(file) == build_report()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, "cannot be read: No such file"),
        ("{}", "is not a report of `gpuhub validate --json`"),
        ("nothing", "is not a report"),
        (build_report().model_copy(update={"format": 2}).model_dump_json(), "has form 2"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, error: str) -> None:
    file = tmp_path / "old.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidRequest, match=error):
        load_report(file)
