"""Progress of long steps: one updating line each at a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

INTERVAL_S = 5.0
_REDRAW_S = 0.1
_TEXT_WIDTH = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How far one step is; steps are told apart by their labels."""

    label: str
    #: What it does at the moment.
    text: str = ""
    #: Bytes so far, and of how many (0: unknown).
    done: int = 0
    total: int = 0
    is_finished: bool = False


Report = Callable[[Step], None]


def render_step(step: Step) -> str:
    """Such as `rig1: gpuhub/notebook  812 of 1388 MB (58 %)`."""
    words = [step.label]
    if step.total and not step.is_finished:
        # The total is an estimate: what is left to do must never look like nothing.
        percent = min(99, step.done * 100 // step.total)
        words.append(f"{_mb(step.done)} of {_mb(step.total)} MB ({percent} %)")
    elif step.done:
        words.append(f"{_mb(step.done)} MB")
    if step.text:
        words.append(step.text[:_TEXT_WIDTH])
    return "  ".join(words)


def _mb(size: int) -> int:
    return size // 1_000_000


class Terminal:
    """A `Report` that writes to a stream. Safe to call from several threads."""

    def __init__(
        self, stream: TextIO | None = None, *, is_live: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stdout
        self._is_live = self._stream.isatty() if is_live is None else is_live
        self._clock = clock
        self._begun: dict[str, float] = {}
        self._active: dict[str, Step] = {}
        self._shown: dict[str, float] = {}
        self._lock = threading.Lock()

    def __call__(self, step: Step) -> None:
        """Show it, or keep it until the next line is due."""
        with self._lock:
            now = self._clock()
            begun = self._begun.setdefault(step.label, now)
            if step.is_finished:
                self._active.pop(step.label, None)
                self._begun.pop(step.label)
                self._shown.pop(step.label, None)
                self._write(f"{self._clear()}  ✓ {render_step(step)}  ({now - begun:.1f} s)\n")
                self._draw()
            else:
                self._active[step.label] = step
                self._show(step, now)

    def _show(self, step: Step, now: float) -> None:
        key = "" if self._is_live else step.label
        wait_s = _REDRAW_S if self._is_live else INTERVAL_S
        if key in self._shown and now - self._shown[key] < wait_s:
            return
        self._shown[key] = now
        if self._is_live:
            self._draw()
        else:
            self._write(f"  … {render_step(step)}\n")

    def _draw(self) -> None:
        if self._is_live and self._active:
            line = "  … " + " | ".join(render_step(step) for step in self._active.values())
            self._write(self._clear() + line[: shutil.get_terminal_size().columns - 1])

    def _clear(self) -> str:
        return "\r\x1b[2K" if self._is_live else ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
