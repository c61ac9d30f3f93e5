"""Renews images/python/requirements.lock: `python -m gpuhub.images.lock ROOT-OF-THE-CLONE`."""

from __future__ import annotations

import json
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuhub.images.commands import run_shown
from gpuhub.images.progress import Terminal
from gpuhub.images.wheels import build_fitting, find_pip

#: See requirements.in for the reason.
LEFT_OUT = {"lark", "rfc3987-syntax"}
_DEADLINE_S = 600.0


def build_lock(report: dict[str, Any]) -> str:
    """The lock's text from pip's installation report (`pip install --report`)."""
    found = {_normal(item["metadata"]["name"]): item["metadata"]["version"] for item in report["install"]}
    pins = [f"{name}=={version}" for name, version in sorted(found.items()) if name not in LEFT_OUT]
    return "\n".join(["# Made by `python -m gpuhub.images.lock` from requirements.in.", *pins, ""])


def build_resolve(pip: Sequence[str], requirements: Path, report: Path, machine: str) -> list[str]:
    """The command that resolves without installing."""
    asked = ["install", "--dry-run", "--ignore-installed", "--quiet", "--target", str(report.parent / "none")]
    return [*pip, *asked, *build_fitting(machine), "--report", str(report), "--requirement", str(requirements)]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(root: Path) -> None:
    """Resolve anew and write the lock."""
    python = root / "images/python"
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = build_resolve(find_pip(), python / "requirements.in", report, platform.machine())
        run_shown(command, label="Resolving", report=Terminal(), deadline_s=_DEADLINE_S)
        text = build_lock(json.loads(report.read_text(encoding="utf-8")))
    (python / "requirements.lock").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
