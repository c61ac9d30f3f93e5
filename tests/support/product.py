"""The whole product as a user starts it, and polling for its effects."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
#: The backend in the tests of the whole product.
ENGINE = os.environ.get("GPUHUB_TEST_ENGINE", "builtin")
#: The practice closet in the tests of the whole product.
CLOSET = os.environ.get("GPUHUB_TEST_CLOSET", "practice")


def build_instance(base: str, process: str) -> str:
    """Return the instance of one of pytest-xdist's processes, such as `gw1`; the base itself without one.

    An instance has at most eight characters, and the last one is left to tests that start a second instance.
    """
    return f"{base[: 7 - len(process[2:])]}{process[2:]}" if process else base


def run_make(instance: str, target: str, closet: str = CLOSET, **variables: str) -> str:
    """Run a make target as README describes it and return its output; `variables` are further ones of make."""
    all_variables = {"INSTANCE": instance, "ENGINE": ENGINE, "CLOSET": closet, **variables}
    done = subprocess.run(
        ["make", "--no-print-directory", target, *(f"{name}={value}" for name, value in all_variables.items())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, f"make {target} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def stop_earlier_run(instance: str) -> None:
    """Stop what an earlier run of the tests has left, as far as that is possible.

    Where that run was killed, the nodes' daemons do not answer and `make down` says that it could not clean them: their
    next start does.
    """
    command = ["make", "--no-print-directory", "down", f"INSTANCE={instance}"]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=1800, check=False)


def join_columns(text: str) -> str:
    """Return a table's text with one space between columns, whose widths depend on other rows."""
    return re.sub(r"(?<=\S) +", " ", text)


def wait_for(
    condition: Callable[[], T | None],
    expected: str | Callable[[], str],
    deadline_s: float = 60.0,
    *,
    every_s: float = 0.2,
) -> T:
    """Return the first true result of `condition`; fail with `expected` after the deadline, called if it is a function."""
    end = time.monotonic() + deadline_s
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > end:
            raise AssertionError(
                f"not within {deadline_s:.0f} s: {expected if isinstance(expected, str) else expected()}"
            )
        time.sleep(every_s)
