"""Progress of long steps, and programs that run with their output as progress.

A terminal shows one updated line, other outputs get a plain line every few seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from gpuhub.common.errors import SetupError

_KEPT_LINES = 15
#: Interval between two plain lines of a step, seconds.
LINE_INTERVAL_S = 5.0
_REDRAW_S = 0.1
_TEXT_WIDTH = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressStep:
    """The progress of one step; the label identifies the step."""

    label: str
    #: The current action.
    text: str = ""
    #: Bytes so far, and in total (0: unknown).
    done: int = 0
    total: int = 0
    is_finished: bool = False


ProgressCallback = Callable[[ProgressStep], None]


def format_step(step: ProgressStep) -> str:
    """Return a line such as `rig1: gpuhub/notebook  812 of 1388 MB (58 %)`."""
    parts = [step.label]
    if step.total and not step.is_finished:
        # The total is an estimate, so an unfinished step never shows 100 %.
        percent = min(99, step.done * 100 // step.total)
        parts.append(f"{_mb(step.done)} of {_mb(step.total)} MB ({percent} %)")
    elif step.done:
        parts.append(f"{_mb(step.done)} MB")
    if step.text:
        parts.append(step.text[:_TEXT_WIDTH])
    return "  ".join(parts)


def _mb(size: int) -> int:
    return size // 1_000_000


class ProgressTerminal:
    """A `ProgressCallback` that writes to a stream; safe to call from several threads."""

    def __init__(
        self, stream: TextIO | None = None, *, is_live: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stdout
        self._is_live = self._stream.isatty() if is_live is None else is_live
        self._clock = clock
        self._started: dict[str, float] = {}
        self._active: dict[str, ProgressStep] = {}
        self._shown_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def __call__(self, step: ProgressStep) -> None:
        """Show the step, or keep it until the next line is due."""
        with self._lock:
            now = self._clock()
            started = self._started.setdefault(step.label, now)
            if step.is_finished:
                self._active.pop(step.label, None)
                self._started.pop(step.label)
                self._shown_at.pop(step.label, None)
                self._write(f"{self._clear()}  ✓ {format_step(step)}  ({now - started:.1f} s)\n")
                self._draw()
            else:
                self._active[step.label] = step
                self._show(step, now)

    def _show(self, step: ProgressStep, now: float) -> None:
        key = "" if self._is_live else step.label
        wait_s = _REDRAW_S if self._is_live else LINE_INTERVAL_S
        if key in self._shown_at and now - self._shown_at[key] < wait_s:
            return
        self._shown_at[key] = now
        if self._is_live:
            self._draw()
        else:
            self._write(f"  … {format_step(step)}\n")

    def _draw(self) -> None:
        if self._is_live and self._active:
            line = "  … " + " | ".join(format_step(step) for step in self._active.values())
            self._write(self._clear() + line[: shutil.get_terminal_size().columns - 1])

    def _clear(self) -> str:
        return "\r\x1b[2K" if self._is_live else ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def run_with_progress(
    command: Sequence[str],
    *,
    label: str,
    report: ProgressCallback,
    deadline_s: float,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run a command with its output as progress.

    Raises:
        SetupError: It is not installed, it failed (with its last lines), or it took longer than the deadline.
    """
    last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except FileNotFoundError as error:
        raise SetupError(f"{label}: {command[0]} is not installed on this machine") from error
    timer = threading.Timer(deadline_s, process.kill)
    timer.start()
    try:
        with process:
            for line in process.stdout or ():
                last_lines.append(line.rstrip())
                report(ProgressStep(label=label, text=line.strip()))
    finally:
        is_late = not timer.is_alive()
        timer.cancel()
    if is_late:
        raise SetupError(f"{label}: `{command[0]}` was not finished after {deadline_s / 60:.0f} minutes")
    if process.returncode:
        raise SetupError(f"{label}: `{command[0]}` failed:\n" + "\n".join(last_lines))


def read_output(command: Sequence[str]) -> str:
    """Return the output of a command; empty if it is not installed or fails, for values with a default."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""
