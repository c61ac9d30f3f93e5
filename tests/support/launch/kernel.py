"""A kernel of a notebook on rig1, without sockets: cells, their output and their errors."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import textwrap
import threading
from dataclasses import dataclass

from tests.support.launch.local_cluster import DEADLINE_S, PYTHON, Notebook, environment

#: A kernel without sockets: reads cells as lines of JSON, and writes one line at the end of each.
KERNEL = """
    import json, sys
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config
    shell = InteractiveShell.instance(config=Config({"InteractiveShell": {"colors": "nocolor"}}))
    shell.run_line_magic("load_ext", "gpu_launch")
    for line in sys.stdin:
        ended = shell.run_cell(json.loads(line), store_history=True)
        error = ended.error_in_exec or ended.error_before_exec
        sys.stderr.flush()
        print("=== ", json.dumps([type(error).__name__, str(error)] if error else None), sep="", flush=True)
"""


@dataclass(frozen=True)
class CellOutput:
    """The output of a cell, and its error's type and message."""

    text: str
    kind: str
    error: str


class Kernel:
    """A notebook on rig1."""

    def __init__(self, notebook: Notebook, *, keep_s: int = 600, gpus: tuple[str, ...] = ("GPU-rig1",)) -> None:
        self.notebook = notebook
        environ = environment(notebook.broker, node="rig1", gpus=gpus)
        self.process = subprocess.Popen(
            [PYTHON, "-u", "-W", "ignore", "-c", textwrap.dedent(KERNEL)],
            env=environ | {"GPUHUB_KEEP_WORKERS_S": str(keep_s)},
            cwd=notebook.home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._seen: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as shown:
            for line in shown:
                self._lines.put(line)
        self._lines.put(None)

    def begin(self, cell: str) -> None:
        """Start a cell."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(textwrap.dedent(cell)) + "\n")
        self.process.stdin.flush()

    def line(self) -> str:
        """Return the next line of output."""
        text = self._lines.get(timeout=DEADLINE_S)
        assert text is not None, f"the kernel ended: {''.join(self._seen)}"
        self._seen.append(text)
        return text

    def shows(self, wanted: str) -> None:
        """Wait until a line contains this text."""
        while wanted not in (line := self.line()):
            assert not line.startswith("=== "), f"the cell ended without {wanted!r}: {line}"

    def shows_both(self, wanted: str) -> None:
        """Wait until both ranks have printed this."""
        shown = ""
        while not is_printed_by_both(wanted, shown):
            shown += self.line()
            assert "=== " not in shown, shown

    def end(self) -> CellOutput:
        """Wait for the cell's end."""
        text = ""
        while not (line := self.line()).startswith("=== "):
            text += line
        error = json.loads(line[4:])
        return CellOutput(text, *(error or ("", "")))

    def run(self, cell: str) -> CellOutput:
        """Run a cell and return its output."""
        self.begin(cell)
        return self.end()

    def good(self, cell: str) -> str:
        """Run a cell that succeeds, and return its output."""
        shown = self.run(cell)
        assert not shown.kind, f"{shown.error}\n{shown.text}"
        return shown.text

    def close(self) -> None:
        """End the kernel as Jupyter does."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join(DEADLINE_S)


def is_printed_by_both(line: str, shown: str) -> bool:
    """Return whether both ranks printed it, in one line or in two."""
    apart = all(f"[rank {rank} · rig{rank + 1}] {line}\n" in shown for rank in (0, 1))
    return apart or f"[ranks 0-1 ×2] {line}\n" in shown
