"""Output of long operations: the interface of the administrator's console, and the steps of `gpuhub up` and `down`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TextIO

from gpuhub.broker_api.schemas import LeaseView


class OperatorConsole(Protocol):
    """The person who runs an operation: sees its output, and confirms changes."""

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None where the output goes to a file or a pipe."""

    def write(self, text: str = "") -> None:
        """Write the text and a line end."""

    def write_leases(self, node: str, leases: Sequence[LeaseView]) -> None:
        """Write a table of the leases with containers on the node."""

    def confirm(self, question: str) -> None:
        """Ask a question and return if the answer is yes.

        Raises:
            InvalidRequest: The answer is not yes, or cannot be given without a terminal.
        """


class StepReport:
    """The steps of an operation, one line each with its duration, and notes between them."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._started = time.monotonic()

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show a step while it runs, and its duration when it is done."""
        started = time.monotonic()
        live = self._stream.isatty()
        self._write(f"  … {title}", end="" if live else "\n")
        try:
            yield
        except BaseException:
            self._write(f"{self._clear_line()}  ✗ {title}")
            raise
        self._write(f"{self._clear_line()}  ✓ {title}  ({time.monotonic() - started:.1f} s)")

    def note(self, text: str = "") -> None:
        """Write one line."""
        self._write(text)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the report was made."""
        return time.monotonic() - self._started

    def _clear_line(self) -> str:
        return "\r\x1b[2K" if self._stream.isatty() else ""

    def _write(self, text: str, end: str = "\n") -> None:
        self._stream.write(text + end)
        self._stream.flush()
