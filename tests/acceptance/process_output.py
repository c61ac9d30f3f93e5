"""The output of a long process, read while it runs."""

from __future__ import annotations

import re
import subprocess
import threading

from tests.support.product import wait_for


class ProcessOutput:
    """The output of a process; each `wait` continues after the previous match."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: list[str] = []
        self._at = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """The output so far."""
        return "".join(self._lines)

    def wait(self, pattern: str, deadline_s: float = 90) -> re.Match[str]:
        """Wait for the next match of a pattern."""

        def find() -> re.Match[str] | None:
            return re.compile(pattern).search(self.text, self._at)

        try:
            match = wait_for(find, pattern, deadline_s=deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; printed:\n{self.text}") from None
        self._at = match.end()
        return match

    def rest(self, deadline_s: float = 60) -> str:
        """Wait for the end of the process and return all of its output."""
        self.process.wait(deadline_s)
        self._reader.join(deadline_s)
        return self.text

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
