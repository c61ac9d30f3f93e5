"""The screens that show a launch: a notebook cell with its panel, and a terminal or a file with lines."""

from __future__ import annotations

import secrets
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO

from gpu_launch.common.displays import Display
from gpu_launch.output.display_order import publish_display
from gpu_launch.output.display_tabs import DisplayTabs, RankDisplay
from gpu_launch.output.panel import PanelView, build_html, build_line
from gpu_launch.output.text import format_exact_span

_REFRESH_S = 1.0  # seconds between updates of a panel or a line
_TABS_S = 0.2  # seconds between updates of what ranks display
_TABS_CHARACTERS_S = 4_000_000  # most characters a second of such updates after the first one


class Screen(Protocol):
    """The display of a launch and its ranks."""

    def show_progress(self, text: str, *, phase: str = "") -> None:
        """Show the current step; its time counts from the start of the phase, or of the text if there is no phase."""

    def show_panel(self, view: PanelView) -> None:
        """Show the panel. A closing view is shown at once, and stays."""

    def write(self, stream: str, text: str) -> None:
        """Write lines of ranks to `stdout` or `stderr`."""

    def flush(self) -> None:
        """Flush the written text."""

    def show_displays(self, displays: Sequence[RankDisplay], *, last: bool = False) -> None:
        """Show plots and tables of ranks; with `last` everything now, because no more may come."""


def find_screen() -> Screen:
    """Return the screen of this process."""
    if not is_in_notebook():
        return TextScreen()
    from IPython.display import DisplayHandle

    return NotebookScreen(DisplayHandle, publish=publish_display)


class _PhaseTimer:
    """The current text and the start of its phase."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.text, self._phase = "", ""
        self._since = clock()

    def set(self, text: str, phase: str) -> None:
        if (phase or text) != self._phase:
            self._phase, self._since = phase or text, self._clock()
        self.text = text

    def elapsed(self) -> str:
        seconds = self._clock() - self._since
        return format_exact_span(seconds) if seconds >= 1 else ""


class TabsOutput:
    """The output of a cell with what ranks display: one block that is updated in place."""

    def __init__(
        self, tabs: DisplayTabs, handle: Callable[[], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tabs, self._make, self._clock = tabs, handle, clock
        self._handle: Any = None
        self._html, self._due_at = "", float("-inf")

    def due_in_s(self) -> float:
        """Return the seconds until the block may be shown again, at least 0."""
        return max(0.0, self._due_at - self._clock())

    def show(self, *, is_last: bool = False) -> None:
        """Show the block as it is now, if it has changed; `is_last` if it will not change any more."""
        html = self._tabs.render(is_final=is_last)
        if html == self._html:
            return
        self._html = html
        self._due_at = self._clock() + max(_TABS_S, len(html) / _TABS_CHARACTERS_S)
        data = {"text/plain": self._tabs.describe(), "text/html": html}
        if self._handle is None:
            self._handle = self._make()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)


class NotebookScreen:
    """A cell's output: one panel that is updated in place, with the streams below it."""

    def __init__(
        self,
        handle: Callable[[], Any],
        clock: Callable[[], float] = time.monotonic,
        *,
        publish: Callable[[Display], None] = lambda display: None,
    ) -> None:
        self._make, self._clock, self._publish = handle, clock, publish
        self._handle: Any = None
        self._progress = _PhaseTimer(clock)
        self._view = PanelView()
        self._shown: tuple[str, PanelView] | None = None
        self._shown_at = float("-inf")
        self._tabs = DisplayTabs(f"gl-{secrets.token_hex(4)}")
        self._tabs_output = TabsOutput(self._tabs, handle, clock)
        self._are_tabs_stale = False

    def show_displays(self, displays: Sequence[RankDisplay], *, last: bool = False) -> None:
        for shown in displays:
            if shown.is_only_rank:
                self._publish(shown.display)
                continue
            self._tabs.add(shown)
            self._are_tabs_stale = True
        if last or (self._are_tabs_stale and self._tabs_output.due_in_s() <= 0):
            self._are_tabs_stale = False
            self.flush()
            self._tabs_output.show(is_last=last)

    def show_progress(self, text: str, *, phase: str = "") -> None:
        is_new = text != self._progress.text
        self._progress.set(text, phase)
        if is_new and self._is_due():
            self._show()

    def show_panel(self, view: PanelView) -> None:
        self._view = view
        if self._is_due() or (view.is_closing and self._shown != (self._progress.text, view)):
            self._show()

    def write(self, stream: str, text: str) -> None:
        (sys.stdout if stream == "stdout" else sys.stderr).write(text)

    def flush(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()

    def _is_due(self) -> bool:
        return self._clock() - self._shown_at >= _REFRESH_S

    def _show(self) -> None:
        text, elapsed = self._progress.text, self._progress.elapsed()
        data = {
            "text/plain": f"gpu_launch: {build_line(text, self._view, elapsed)}",
            "text/html": build_html(text, self._view, elapsed),
        }
        self._shown, self._shown_at = (text, self._view), self._clock()
        if self._handle is None:
            self._handle = self._make()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)


class TextScreen:
    """A terminal, where one line is redrawn below the ranks' lines; or a file, with one line for each change."""

    def __init__(
        self, out: TextIO | None = None, err: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out, self._err, self._clock = out or sys.stdout, err or sys.stderr, clock
        self._is_terminal = self._out.isatty()
        self._progress = _PhaseTimer(clock)
        self._view = PanelView()
        #: The last progress, without the parts that change all the time.
        self._shown: tuple[str, int | None] = ("", None)
        self._shown_at = float("-inf")
        self._is_drawn = False

    def show_progress(self, text: str, *, phase: str = "") -> None:
        if text != self._progress.text:
            # The earlier view belongs to the earlier step.
            self._view = PanelView()
        self._progress.set(text, phase)
        self._refresh()

    def show_panel(self, view: PanelView) -> None:
        self._view = view
        self._refresh()

    def write(self, stream: str, text: str) -> None:
        self._erase()
        (self._out if stream == "stdout" else self._err).write(text)

    def flush(self) -> None:
        self._err.flush()
        if self._is_terminal and not self._view.is_closing and not self._is_drawn:
            self._draw()
        self._out.flush()

    def show_displays(self, displays: Sequence[RankDisplay], *, last: bool = False) -> None:
        """Do nothing: ranks display nothing but text where a terminal shows their launch."""

    def _refresh(self) -> None:
        shown = (self._progress.text, _progress_in_tenths(self._view))
        is_new = shown != self._shown and bool(self._progress.text)
        if self._view.is_closing or not self._is_terminal:
            if is_new or self._is_drawn:
                self._shown = shown
                self._erase()
                self._out.write(f"{self._line('')}\n")
                self._out.flush()
        elif is_new or self._clock() - self._shown_at >= _REFRESH_S:
            self._shown = shown
            self._draw()

    def _line(self, elapsed: str) -> str:
        return f"gpu_launch: {build_line(self._progress.text, self._view, elapsed)}"

    def _draw(self) -> None:
        width = shutil.get_terminal_size().columns - 1
        line = self._line(self._progress.elapsed())
        self._out.write(f"\r\x1b[K{line if len(line) <= width else line[: width - 1] + '…'}")
        self._out.flush()
        self._shown_at, self._is_drawn = self._clock(), True

    def _erase(self) -> None:
        if self._is_drawn:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._is_drawn = False


def _progress_in_tenths(view: PanelView) -> int | None:
    """Return the progress of the fastest loop in tenths: coarse enough for one line for each change."""
    part = view.bars[-1].fraction if view.bars else None
    return None if part is None else int(part * 10)


def is_in_notebook() -> bool:
    """Return whether output goes to a notebook's cell, which can show more than text."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")
