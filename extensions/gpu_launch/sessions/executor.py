"""Runs cells on a rank as a notebook does: names persist, the last value is shown, tracebacks show the cell's lines."""

from __future__ import annotations
import __future__

import ast
import io
import linecache
import re
import signal
import sys
import threading
import time
import tokenize
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import CodeType, FrameType, ModuleType, TracebackType

#: `  File "Cell In[7]", line 3, in <module>`, which a notebook writes as `  Cell In[7], line 3`.
_CELL_LINE = re.compile(r'^(\s*)File "(Cell In\[[^]"]*\])", line (\d+)(, in <module>)?', re.MULTILINE)
_INVISIBLE_TOKENS = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.DEDENT})
_SIGNAL_S = 0.05  # seconds for a signal to take effect
_RETRY_S = 1.0  # seconds during which an interrupt is tried again


class CellOutcome(StrEnum):
    """The outcome of a cell on a rank."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The end of a cell; `error` is the traceback, empty for none."""

    outcome: CellOutcome
    error: str = ""
    #: Nanoseconds since 1970, by this node's clock.
    at_ns: int


class SessionExecutor:
    """Runs one cell after another in `module`'s namespace. For the main thread, which receives signals."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._flags = 0
        #: The running cell; None at the prompt.
        self._running: int | None = None
        #: Python has handled the signal of the last interrupt.
        self._is_signal_handled = False
        #: What the last cell raised, for the debugger.
        self.failure: BaseException | None = None
        self._install_handler()

    def interrupt(self, cell: int) -> None:
        """Raise KeyboardInterrupt once in that cell if it still runs. Not for the main thread."""
        deadline = time.monotonic() + _RETRY_S
        self._is_signal_handled = False
        # A signal right before a system call does not end that call, so it is sent again until Python has handled it.
        while self._running == cell and not self._is_signal_handled and time.monotonic() < deadline:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(_SIGNAL_S)

    def run(self, number: int, work: Callable[[], None]) -> CellResult:
        """Do the work of cell `number`, which `interrupt` may end; return its result, whatever it raised."""
        # An earlier cell may have set another handler.
        self._install_handler()
        how, error = CellOutcome.DONE, ""
        self.failure = None
        try:
            try:
                self._running = number
                work()
            finally:
                self._running = None
        except KeyboardInterrupt as raised:
            how, error = CellOutcome.INTERRUPTED, format_traceback(raised)
        except BaseException as raised:  # noqa: BLE001 - the user's code: whatever it raises is shown
            how, error = CellOutcome.FAILED, format_traceback(raised)
            self.failure = raised.with_traceback(_strip_executor_frames(raised.__traceback__))
        # An interrupt may have come while the field was reset.
        self._running = None
        return CellResult(outcome=how, error=error, at_ns=time.time_ns())

    def execute(self, body: str, *, label: str, source: str, skipped: int = 0) -> None:
        """Run a cell, which may raise any exception.

        `exit()` ends the cell, not the rank.

        Args:
            body: The code.
            label: The cell's name in tracebacks.
            source: The whole cell.
            skipped: Lines of `source` before the body.
        """
        # Without a time, linecache never checks for a file of that name.
        linecache.cache[label] = (len(source), None, source.splitlines(keepends=True), label)
        try:
            self._execute("\n" * skipped + body, label)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise

    def _install_handler(self) -> None:
        signal.signal(signal.SIGINT, self._handle_signal)

    def _handle_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._is_signal_handled = True
        if self._running is not None:
            raise KeyboardInterrupt

    def _execute(self, text: str, label: str) -> None:
        tree = compile(text, label, "exec", self._flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        assert isinstance(tree, ast.Module)  # noqa: S101 - what the flag gives
        last: list[ast.stmt] = []
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not _ends_with_semicolon(text):
            last = [tree.body.pop()]
        self._exec(compile(tree, label, "exec", self._flags, dont_inherit=True))
        if last:
            # Python's own way to show a value: sys.displayhook, which also keeps it as `_`.
            self._exec(compile(ast.Interactive(body=last), label, "single", self._flags, dont_inherit=True))

    def _exec(self, code: CodeType) -> None:
        for name in __future__.all_feature_names:
            self._flags |= code.co_flags & getattr(__future__, name).compiler_flag
        exec(code, vars(self._module))  # noqa: S102 - the user's own cell


def format_traceback(error: BaseException) -> str:
    """Format the traceback from the cell's first frame on, with lines as in a notebook."""
    trace = _strip_executor_frames(error.__traceback__)
    lines = traceback.TracebackException(type(error), error, trace).format()
    return _CELL_LINE.sub(r"\1\2, line \3", "".join(lines)).rstrip("\n")


def flush_streams() -> None:
    """Flush the standard streams, also after a cell has replaced sys.stdout."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError, AttributeError):
            continue


def _strip_executor_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the frames below the start of the cell, or all if the cell did not start."""
    first_user_frame = frame = trace
    while frame is not None:
        code = frame.tb_frame.f_code
        if code.co_filename == __file__ and code is not SessionExecutor._handle_signal.__code__:
            first_user_frame = frame.tb_next
        frame = frame.tb_next
    return first_user_frame


def _ends_with_semicolon(text: str) -> bool:
    """Return whether the cell ends with `;`, which suppresses the last value as in a notebook."""
    tokens = [
        token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in _INVISIBLE_TOKENS
    ]
    return bool(tokens) and tokens[-1].string == ";"
