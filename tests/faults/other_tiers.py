"""Runs tests of other folders that inject a case, each in a separate process."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.faults.testbed import INSTANCE
from tests.support.product import ROOT


def run(*tests: str, deadline_s: float = 300) -> None:
    """Run these tests, given by their node ids; at least one must exist, and all must pass."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # A separate closet: the product of these cases is running.
    environment["GPUHUB_TEST_INSTANCE"] = f"{INSTANCE[:7]}e"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-3000:]
    assert passed is not None, done.stdout[-3000:]
