"""Runs cells on a rank as a notebook does: names stay, the last value is shown, tracebacks have the cell's lines."""

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
_UNSEEN = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.DEDENT})
_HEARD_S = 0.05  # seconds for a signal to be heard
_AGAIN_S = 1.0  # seconds for an interrupt to be tried again


class How(StrEnum):
    """How a cell ended on a rank."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A cell's end; `error` is the traceback, empty for none."""

    how: How
    error: str = ""
    #: Nanoseconds since 1970, by this node's clock.
    at_ns: int


class Executor:
    """Runs one cell after another in `module`'s names. For the main thread, where signals arrive."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._flags = 0
        #: The cell that runs; None at the prompt.
        self._running: int | None = None
        #: The signal of the last interrupt has reached Python.
        self._is_heard = False
        self._listen()

    def interrupt(self, cell: int) -> None:
        """Raise KeyboardInterrupt in that cell, once, if it still runs. For any thread but the main one."""
        deadline = time.monotonic() + _AGAIN_S
        self._is_heard = False
        # One that comes right before a system call does not end it. Again, until Python has heard of it.
        while self._running == cell and not self._is_heard and time.monotonic() < deadline:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(_HEARD_S)

    def run(self, number: int, work: Callable[[], None]) -> Outcome:
        """Do the work of cell `number`, which `interrupt` may break off; how it ended, whatever it raised."""
        # A cell before may have set another handler.
        self._listen()
        how, error = How.DONE, ""
        try:
            try:
                self._running = number
                work()
            finally:
                self._running = None
        except KeyboardInterrupt as raised:
            how, error = How.INTERRUPTED, describe(raised)
        except BaseException as raised:  # noqa: BLE001 - the user's code: whatever it raises is shown
            how, error = How.FAILED, describe(raised)
        # An interrupt may have come while it was taken back.
        self._running = None
        return Outcome(how=how, error=error, at_ns=time.time_ns())

    def execute(self, body: str, *, label: str, source: str, skipped: int = 0) -> None:
        """Run a cell, which may raise anything. It is called `label`; `skipped` lines of `source` are before its body.

        A rank outlives `exit()`.
        """
        # No time: linecache never looks for a file of that name.
        linecache.cache[label] = (len(source), None, source.splitlines(keepends=True), label)
        try:
            self._execute("\n" * skipped + body, label)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise

    def _listen(self) -> None:
        signal.signal(signal.SIGINT, self._take_signal)

    def _take_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._is_heard = True
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
            # Python's own way to show a value: sys.displayhook, which keeps it as `_` too.
            self._exec(compile(ast.Interactive(body=last), label, "single", self._flags, dont_inherit=True))

    def _exec(self, code: CodeType) -> None:
        for name in __future__.all_feature_names:
            self._flags |= code.co_flags & getattr(__future__, name).compiler_flag
        exec(code, vars(self._module))  # noqa: S102 - the user's own cell


def describe(error: BaseException) -> str:
    """The traceback from the cell's first frame on, as a notebook writes its lines."""
    trace = _own_part(error.__traceback__)
    lines = traceback.TracebackException(type(error), error, trace).format()
    return _CELL_LINE.sub(r"\1\2, line \3", "".join(lines)).rstrip("\n")


def flush() -> None:
    """Hand on what was printed, also by a cell that has put something else in the place of sys.stdout."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError, AttributeError):
            continue


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """What is below the cell's start, or all where it did not come to that."""
    own = found = trace
    while found is not None:
        code = found.tb_frame.f_code
        if code.co_filename == __file__ and code is not Executor._take_signal.__code__:
            own = found.tb_next
        found = found.tb_next
    return own


def _ends_with_semicolon(text: str) -> bool:
    """As in a notebook: a `;` at the end shows nothing."""
    found = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in _UNSEEN]
    return bool(found) and found[-1].string == ";"
