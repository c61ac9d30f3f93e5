"""What a launch shows: a progress line that stays in its place in a notebook, and streams below it."""

from __future__ import annotations

import sys
import time
from typing import Any

_REFRESH_S = 1.0  # seconds between updates of the time on an unchanged line


class Screen:
    """The cell's output, or a terminal."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._in_notebook = _in_notebook()
        self._text = self._phase = ""
        self._since = time.monotonic()
        self._shown_at = 0.0

    def progress(self, text: str, *, phase: str = "") -> None:
        """Show what the launch does now, and for how long: since the phase, or without one the text, began."""
        now = time.monotonic()
        if (phase or text) != self._phase:
            self._phase, self._since = phase or text, now
        if text != self._text:
            self._text = text
            self._show(text)
        elif self._in_notebook and now - self._shown_at >= _REFRESH_S:
            self._show(f"{text} · {now - self._since:.0f} s")

    def write(self, stream: str, text: str) -> None:
        """Show ranks' lines."""
        out = sys.stdout if stream == "stdout" else sys.stderr
        out.write(text)

    def flush(self) -> None:
        """Hand on what was written."""
        sys.stdout.flush()
        sys.stderr.flush()

    def _show(self, text: str) -> None:
        self._shown_at = time.monotonic()
        if not self._in_notebook:
            sys.stdout.write(f"gpu_launch: {text}\n")
            sys.stdout.flush()
            return
        from IPython.display import DisplayHandle

        data = {"text/plain": f"gpu_launch: {text}"}
        if self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)


def _in_notebook() -> bool:
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")
