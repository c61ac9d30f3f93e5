"""The documentation as a site: Sphinx builds it without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_site_is_built_without_warnings(tmp_path: Path) -> None:
    """A page in no list, a link to a missing heading and wrong markup are warnings, and warnings are errors."""
    command = ["-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-c", "docs", "-b", "html", "."]
    built = subprocess.run(
        [sys.executable, *command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    index = (tmp_path / "docs/index.html").read_text(encoding="utf-8")
    assert 'href="using.html"' in index
    assert 'href="../README.html"' in index
