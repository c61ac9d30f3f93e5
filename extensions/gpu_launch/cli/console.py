"""Output to the terminal: results to stdout, everything else to stderr, and one JSON document with --json."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from gpu_launch.errors import GpuLaunchError

#: Seconds between updates of the progress line.
_REDRAW_S = 0.1


@dataclass
class Console:
    """The output of one command."""

    is_json: bool = False
    _is_drawn: bool = False
    _drawn_at: float = 0.0

    def print_result(self, value: Any, text: str) -> None:
        """Print the command's result: `value` with --json, else `text`."""
        self.clear_progress()
        click.echo(json.dumps(value, indent=2, ensure_ascii=False) if self.is_json else text)

    def print_note(self, text: str) -> None:
        """Print a message for a person on a line of its own."""
        self.clear_progress()
        click.echo(text, err=True)

    def draw_progress(self, text: str) -> None:
        """Show a line that the next one replaces; only on a terminal."""
        if sys.stderr.isatty() and time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._drawn_at = time.monotonic()
            # A line as wide as the terminal would wrap, and could not be cleared.
            columns = terminal_columns() - 1
            click.echo(f"\r\x1b[K{text[:columns]}", nl=False, err=True)
            self._is_drawn = True

    def clear_progress(self) -> None:
        """Clear the line of `draw_progress`."""
        if self._is_drawn:
            click.echo("\r\x1b[K", nl=False, err=True)
            self._is_drawn = False

    def write_output(self, text: str) -> None:
        """Write a job's own output; to stderr with --json, whose document goes to stdout."""
        self.clear_progress()
        stream = sys.stderr if self.is_json else sys.stdout
        stream.write(text)
        stream.flush()


def terminal_columns() -> int:
    """Return the width of the terminal; 120 without one, so that piped tables are not cut."""
    import shutil

    return shutil.get_terminal_size((120, 24)).columns


class CommandExit(GpuLaunchError):
    """Ends the command with a status, and with an error message if there is one."""

    def __init__(self, text: str = "", *, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


def exit_with(status: int) -> NoReturn:
    """End the command with this status and without a message."""
    raise CommandExit(status=status)
