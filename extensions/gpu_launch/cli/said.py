"""What goes to the terminal: results to stdout, everything else to stderr, and one JSON document with --json."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from gpu_launch.errors import GpuLaunchError

#: Between two states of a line that is drawn anew, seconds.
_REDRAW_S = 0.1


@dataclass
class Said:
    """How one command speaks."""

    is_json: bool = False
    _is_drawn: bool = False
    _drawn_at: float = 0.0

    def result(self, value: Any, text: str) -> None:
        """The command's result: `value` with --json, else `text`."""
        self.end_line()
        click.echo(json.dumps(value, indent=2, ensure_ascii=False) if self.is_json else text)

    def note(self, text: str) -> None:
        """Something for a person, on a line of its own."""
        self.end_line()
        click.echo(text, err=True)

    def redraw(self, text: str) -> None:
        """Something for a person that the next one replaces; on anything but a terminal it is not shown."""
        if sys.stderr.isatty() and time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._drawn_at = time.monotonic()
            # Wider than the terminal it would wrap, and could not be taken back.
            columns = terminal_columns() - 1
            click.echo(f"\r\x1b[K{text[:columns]}", nl=False, err=True)
            self._is_drawn = True

    def end_line(self) -> None:
        """Take back what `redraw` shows."""
        if self._is_drawn:
            click.echo("\r\x1b[K", nl=False, err=True)
            self._is_drawn = False

    def output(self, text: str) -> None:
        """A job's own output; to stderr with --json, which has stdout for itself."""
        self.end_line()
        stream = sys.stderr if self.is_json else sys.stdout
        stream.write(text)
        stream.flush()


def terminal_columns() -> int:
    """The width of the terminal; 120 where there is none, so that what is piped elsewhere is not cut too short."""
    import shutil

    return shutil.get_terminal_size((120, 24)).columns


class Ended(GpuLaunchError):
    """The command ends with this status; the text, where there is one, is said."""

    def __init__(self, text: str = "", *, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


def leave(status: int) -> NoReturn:
    """End with this status and nothing more to say."""
    raise Ended(status=status)
