"""The output and the status of a detached job, as files that `%gpu_logs` and `%gpu_status` read."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from gpu_launch.common import job_manifest
from gpu_launch.common.run_folder import RunFolder, write_private
from gpu_launch.errors import LaunchFailed, UsageError
from gpu_launch.output.display_tabs import RankDisplay
from gpu_launch.output.panel import PanelView, build_line

#: Interval between two writes of a status of which only the text has changed, seconds.
_TEXT_S = 2.0
#: Interval between two writes of an unchanged status, seconds.
_BEAT_S = 10.0
#: Size of a file that is removed when the disk is full, so that the last line can be written.
_SPARE_BYTES = 64 * 1024
#: Maximum length of the status's error, characters; with that of the text, it keeps the file below
#: `courier.files.MAX_STATUS`.
_MAX_ERROR = 12_000
#: Maximum length of the status's text, characters.
_MAX_TEXT = 1000


class Journal:
    """`output.log` and `state.json`; both continue after those of an earlier start of the same job."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._spare = run.root / ".spare"
        self._output: int | None = None
        self._written_at = 0.0
        self._is_stale = True
        #: Writing has failed: only `close` tries once more.
        self._is_broken = False
        self.state = job_manifest.JobStatus(state="starting")

    def open(self) -> job_manifest.JobStatus | None:
        """Open the files; return the last status of an earlier start, None where there was none.

        Raises:
            LaunchFailed: when they cannot be written.
        """
        with contextlib.suppress(OSError, UsageError):
            self.state = job_manifest.parse_status(self._run.status.read_text())
        found = self.state if self._run.status.exists() else None
        with self._translate_errors("output.log"):
            if not self._spare.exists():
                self._spare.write_bytes(bytes(_SPARE_BYTES))
            self._output = os.open(self._run.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return found

    def write(self, text: str) -> None:
        """Append to the output.

        Raises:
            LaunchFailed: when it cannot be written.
        """
        if self._output is None or self._is_broken:
            return
        data = memoryview(text.encode(errors="backslashreplace"))
        with self._translate_errors("output.log"):
            while data:
                data = data[os.write(self._output, data) :]

    def update(self, **changes: Any) -> None:
        """Change the status; it is written when it has changed, and at least every 10 s.

        Raises:
            LaunchFailed: when it cannot be written.
        """
        changed = {name for name, value in changes.items() if getattr(self.state, name) != value}
        self.state = replace(self.state, **changes)
        self._is_stale |= bool(changed)
        now = time.monotonic()
        wait_s = 0.0 if changed - {"text"} else _TEXT_S if self._is_stale else _BEAT_S
        if now - self._written_at >= wait_s and not self._is_broken:
            with self._translate_errors("state.json"):
                self._write_status()
            self._written_at, self._is_stale = now, False

    def close(self, words: str, **changes: Any) -> None:
        """Write the last line and the last status, on a full disk too."""
        self._spare.unlink(missing_ok=True)
        self._is_broken = False
        self.state = replace(self.state, **changes)
        with contextlib.suppress(OSError):
            self._write_status()
        with contextlib.suppress(LaunchFailed):
            self.write(words)
        if self._output is not None:
            os.close(self._output)
            self._output = None

    def _write_status(self) -> None:
        state = replace(self.state, error=_shorten(self.state.error), text=self.state.text[:_MAX_TEXT])
        write_private(self._run.status, job_manifest.dump_json(state).encode())

    @contextlib.contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._is_broken = True
            raise LaunchFailed(
                f"{what} of this job cannot be written in {self._run.root}: {error.strerror or error}."
            ) from None


def _shorten(error: str) -> str:
    """Return begin and end of a long error; the output has all of it."""
    if len(error) <= _MAX_ERROR:
        return error
    left_out = f"\n[{len(error) - _MAX_ERROR} characters are left out; output.log has them]\n"
    return f"{error[: _MAX_ERROR // 2]}{left_out}{error[-_MAX_ERROR // 2 :]}"


class JournalScreen:
    """A `Screen` that writes to a journal; `observe` returns further fields of the status."""

    def __init__(self, journal: Journal, observe: Callable[[], dict[str, Any]] = dict) -> None:
        self._journal, self._observe = journal, observe
        self._view = PanelView()

    def show_progress(self, text: str, *, phase: str = "") -> None:
        """Update the status with the current activity."""
        del phase
        self._journal.update(text=build_line(text, self._view, ""), **self._observe())

    def write(self, stream: str, text: str) -> None:
        """Write ranks' lines, of both streams in the order of their arrival."""
        del stream
        self._journal.write(text)

    def flush(self) -> None:
        """Do nothing: `write` has written everything."""

    def show_displays(self, displays: Sequence[RankDisplay], *, last: bool = False) -> None:
        """Do nothing: ranks of a job display nothing but text."""

    def show_panel(self, view: PanelView) -> None:
        """Keep steps and GPUs for the status's text."""
        self._view = view
