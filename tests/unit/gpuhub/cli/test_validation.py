"""The command `gpuhub validate`: refusals before anything starts, and where the report goes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from gpuhub.cli import main
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.options import BrokerRunner
from gpuhub.cli.validation import publish_report
from gpuhub.common.errors import InvalidRequest
from gpuhub.ops.validation.report import load_report
from tests.support.validation import build_report


def run(*words: str | Path) -> None:
    main.cli.main(["validate", *map(str, words)], obj=BrokerRunner(), standalone_mode=False)


def test_files_are_checked_before_minutes_of_work(tmp_path: Path) -> None:
    """A folder that does not exist, and an earlier report that is none, are refused at once."""
    with pytest.raises(InvalidRequest, match=r"x\.json: there is no folder .*/missing"):
        run("--json", tmp_path / "missing/x.json")
    with pytest.raises(InvalidRequest, match=r"x\.html: there is no folder"):
        run("--html", tmp_path / "missing/x.html")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        run("--compare", tmp_path / "old.json")


def test_report_goes_to_terminal_and_files(tmp_path: Path) -> None:
    """The comparison is on the terminal and on the page; the JSON is the report alone."""
    output, before, now = io.StringIO(), build_report(bandwidth=5.0), build_report()
    files = {"json_file": tmp_path / "now.json", "html_file": tmp_path / "now.html"}
    publish_report(now, before, AdminConsole(output), **files)
    worse = "network.rig1-rig2.bandwidth: 2.3 Gbit/s, was 5 Gbit/s (54% worse)"
    assert worse in output.getvalue()
    assert worse in files["html_file"].read_text()
    assert load_report(files["json_file"]) == now


def test_report_without_files_is_text_alone() -> None:
    output = io.StringIO()
    publish_report(build_report(), None, AdminConsole(output), json_file=None, html_file=None)
    assert "3 passed, 0 failed, 1 for information" in output.getvalue()
    assert "Compared" not in output.getvalue()
