"""What `gpuhub up` and `gpuhub down` tell the person at the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


class Report:
    """Steps with their time, one line each; notes below them."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._begin = time.monotonic()

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show a step while it runs and its time when it is done."""
        begin = time.monotonic()
        live = self._stream.isatty()
        self._write(f"  … {title}", end="" if live else "\n")
        try:
            yield
        except BaseException:
            self._write(f"{self._again()}  ✗ {title}")
            raise
        self._write(f"{self._again()}  ✓ {title}  ({time.monotonic() - begin:.1f} s)")

    def note(self, text: str = "") -> None:
        """A line of its own."""
        self._write(text)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the report began."""
        return time.monotonic() - self._begin

    def _again(self) -> str:
        return "\r\x1b[2K" if self._stream.isatty() else ""

    def _write(self, text: str, end: str = "\n") -> None:
        self._stream.write(text + end)
        self._stream.flush()
