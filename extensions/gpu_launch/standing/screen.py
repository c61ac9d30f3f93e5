"""Where standing ranks are seen: in the cell that runs, and nowhere in between."""

from __future__ import annotations

import time

from gpu_launch.display import Screen, find_screen
from gpu_launch.panel import View

#: A cell that takes less shows its output alone.
_SHORT_S = 1.0


class CellScreen:
    """A `Screen` that begins anew with every cell."""

    def __init__(self) -> None:
        self._screen: Screen = find_screen()
        self._from: float | None = None
        self._has_shown = False

    def begin(self, *, at_once: bool) -> None:
        """A cell begins. What goes on is shown `at_once`, or when the cell has taken a moment."""
        self._screen, self._has_shown = find_screen(), False
        self._from = time.monotonic() + (0.0 if at_once else _SHORT_S)

    def rest(self, text: str = "") -> None:
        """The cell has ended; `text` closes it, where its progress was shown."""
        if self._has_shown and text:
            self._screen.progress(text)
            self._screen.panel(View(is_closing=True))
        self._from = None

    def progress(self, text: str, *, phase: str = "") -> None:
        """As Screen."""
        if self._is_shown():
            self._has_shown = True
            self._screen.progress(text, phase=phase)

    def panel(self, view: View) -> None:
        """As Screen."""
        if self._is_shown():
            self._screen.panel(view)

    def write(self, stream: str, text: str) -> None:
        """As Screen."""
        self._screen.write(stream, text)

    def flush(self) -> None:
        """As Screen."""
        self._screen.flush()

    def _is_shown(self) -> bool:
        return self._from is not None and time.monotonic() >= self._from
