"""The program that renews images/python/requirements.lock: `python -m gpuhub.ops.images.lock ROOT-OF-THE-CLONE`."""

from __future__ import annotations

import json
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuhub.ops.images.progress import ProgressTerminal, run_with_progress
from gpuhub.ops.images.wheels import build_platform_options, find_pip

#: See requirements.in for the reason.
EXCLUDED = {"lark", "rfc3987-syntax"}
_DEADLINE_S = 600.0


def build_lock(report: dict[str, Any]) -> str:
    """Build the lock's text from pip's installation report (`pip install --report`)."""
    versions = {_normal(item["metadata"]["name"]): item["metadata"]["version"] for item in report["install"]}
    pins = [f"{name}=={version}" for name, version in sorted(versions.items()) if name not in EXCLUDED]
    return "\n".join(["# Made by `python -m gpuhub.ops.images.lock` from requirements.in.", *pins, ""])


def build_resolve_command(pip: Sequence[str], requirements: Path, report: Path, machine: str) -> list[str]:
    """Return the command that resolves the requirements without installing them."""
    options = ["install", "--dry-run", "--ignore-installed", "--quiet", "--target", str(report.parent / "none")]
    return [
        *pip,
        *options,
        *build_platform_options(machine),
        "--report",
        str(report),
        "--requirement",
        str(requirements),
    ]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(root: Path) -> None:
    """Resolve the requirements again and write the lock."""
    python = root / "images/python"
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = build_resolve_command(find_pip(), python / "requirements.in", report, platform.machine())
        run_with_progress(command, label="Resolving", report=ProgressTerminal(), deadline_s=_DEADLINE_S)
        text = build_lock(json.loads(report.read_text(encoding="utf-8")))
    (python / "requirements.lock").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
