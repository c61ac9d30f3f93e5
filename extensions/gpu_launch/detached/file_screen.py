"""What a detached job shows: its whole output in one file, and where it is in another."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from gpu_launch import order
from gpu_launch.errors import LaunchFailed, UsageError
from gpu_launch.panel import View, build_line
from gpu_launch.runs import RunFolder, write_private

#: Seconds between writes of a state whose text alone has changed, and of one that has not changed at all.
_TEXT_S, _BEAT_S = 2.0, 10.0
#: Given up when the disk is full, so that the last words can be written.
_SPARE_BYTES = 64 * 1024


class Journal:
    """`output.log` and `state.json`; both go on where an earlier start of the same job left them."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._spare = run.root / ".spare"
        self._output: int | None = None
        self._written_at = 0.0
        self._is_stale = True
        #: Nothing more can be written: what comes is on its way to the end, and `close` tries once more.
        self._is_broken = False
        self.state = order.State(state="starting")

    def open(self) -> order.State | None:
        """Begin; the last state of an earlier start, None where there was none. LaunchFailed for a full disk."""
        with contextlib.suppress(OSError, UsageError):
            self.state = order.parse_state(self._run.state.read_text())
        found = self.state if self._run.state.exists() else None
        with self._told("output.log"):
            if not self._spare.exists():
                self._spare.write_bytes(bytes(_SPARE_BYTES))
            self._output = os.open(self._run.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return found

    def write(self, text: str) -> None:
        """Append to the output. LaunchFailed when it cannot be written."""
        if self._output is None or self._is_broken:
            return
        data = memoryview(text.encode(errors="backslashreplace"))
        with self._told("output.log"):
            while data:
                data = data[os.write(self._output, data) :]

    def note(self, **changes: Any) -> None:
        """Change the state; written when it has changed, and every 10 s anyway. LaunchFailed when it cannot be."""
        changed = {name for name, value in changes.items() if getattr(self.state, name) != value}
        self.state = replace(self.state, **changes)
        self._is_stale |= bool(changed)
        now = time.monotonic()
        wait_s = 0.0 if changed - {"text"} else _TEXT_S if self._is_stale else _BEAT_S
        if now - self._written_at >= wait_s and not self._is_broken:
            with self._told("state.json"):
                self._put()
            self._written_at, self._is_stale = now, False

    def close(self, words: str, **changes: Any) -> None:
        """The last words and the last state, also on a disk that is full."""
        self._spare.unlink(missing_ok=True)
        self._is_broken = False
        self.state = replace(self.state, **changes)
        with contextlib.suppress(OSError):
            self._put()
        with contextlib.suppress(LaunchFailed):
            self.write(words)
        if self._output is not None:
            os.close(self._output)
            self._output = None

    def _put(self) -> None:
        write_private(self._run.state, order.dump(self.state).encode())

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._is_broken = True
            raise LaunchFailed(
                f"{what} of this job cannot be written in {self._run.root}: {error.strerror or error}."
            ) from None


class FileScreen:
    """A `display.Screen` that writes to a journal. `observe` gives what else of the state is known."""

    def __init__(self, journal: Journal, observe: Callable[[], dict[str, Any]] = dict) -> None:
        self._journal, self._observe = journal, observe
        self._view = View()

    def progress(self, text: str, *, phase: str = "") -> None:
        """What the launch does now."""
        del phase
        self._journal.note(text=build_line(text, self._view, ""), **self._observe())

    def write(self, stream: str, text: str) -> None:
        """Ranks' lines, of both streams in the order in which they came."""
        del stream
        self._journal.write(text)

    def flush(self) -> None:
        """Everything is written already."""

    def panel(self, view: View) -> None:
        """Steps and GPUs, for the state's text."""
        self._view = view
