"""The terminal of the administrator who runs `gpuhub`: output, questions, and the width of the lines."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TextIO

from gpuhub.broker_api.schemas import LeaseView
from gpuhub.cli import tables
from gpuhub.common.errors import InvalidRequest


class AdminConsole:
    """Text streams to and from the administrator; without a terminal no line is cut and every question is refused."""

    def __init__(self, output: TextIO | None = None, answers: TextIO | None = None) -> None:
        self._output = output or sys.stdout
        self._answers = answers or sys.stdin

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None where the output goes to a file or a pipe."""
        return shutil.get_terminal_size().columns if self._output.isatty() else None

    @property
    def now(self) -> datetime:
        """The current time in this machine's time zone."""
        return datetime.now().astimezone()

    def write(self, text: str = "") -> None:
        """Write the text and a line end."""
        self._output.write(f"{text}\n")
        self._output.flush()

    def write_leases(self, node: str, leases: Sequence[LeaseView]) -> None:
        """Write a table of the leases with containers on the node."""
        self.write(f"Running on {node}:")
        self.write(tables.format_node_leases(leases, node, self.now, self.width))

    def confirm(self, question: str) -> None:
        """Ask a question and return if the answer is yes.

        Raises:
            InvalidRequest: The answer is not yes, or cannot be given without a terminal.
        """
        if not self._answers.isatty():
            raise InvalidRequest("nothing was changed: there is no terminal to confirm it at; --yes skips the question")
        self._output.write(f"{question} [y/N] ")
        self._output.flush()
        if self._answers.readline().strip().lower() not in {"y", "yes"}:
            raise InvalidRequest("nothing was changed")
