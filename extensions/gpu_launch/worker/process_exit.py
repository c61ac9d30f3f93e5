"""Ends a rank's process as Python does at the end of a script, but without the interpreter's teardown.

With torch the teardown takes a fifth of a second. And it can abort a rank that succeeded: a thread of gloo that still
releases the Python callback of a communication hook asks for the interpreter's lock, and Python before 3.14 ends a
thread that asks for it during the teardown, which C++ answers with `terminate called without an active exception`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

#: The first frames of an error are theirs. Python has the name of a module that runs as `__main__` in its spec.
_LAUNCHER_MODULES = frozenset(
    {
        __name__,
        "gpu_launch.worker.forkserver.child",
        "gpu_launch.worker.rank_main",
        "torch.distributed.elastic.multiprocessing.errors",
    }
)


def run_and_exit(run: Callable[[], None]) -> NoReturn:
    """Call `run` and end this process with the exit code, output and signal that Python itself would end with."""
    _exit(_run(run))


def _run(run: Callable[[], None]) -> int:
    """Return the exit code, or minus the signal to end with."""
    try:
        run()
    except SystemExit as end:
        return _exit_code(end.code)
    except BaseException as error:  # noqa: BLE001 - the rank's outermost edge: what Python itself does there
        _show_exception(error)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with contextlib.suppress(Exception):
        print(code, file=sys.stderr, flush=True)  # noqa: T201 - what Python does
    return 1


def _show_exception(error: BaseException) -> None:
    """Show an uncaught exception as Python does, with the script's own excepthook."""
    error.__traceback__ = strip_launcher_frames(error.__traceback__)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as second:  # noqa: BLE001 - neither may keep the rank from ending
        with contextlib.suppress(Exception):
            sys.stderr.write("Error in sys.excepthook:\n")
            traceback.print_exception(second)
            sys.stderr.write("\nOriginal exception was:\n")
            traceback.print_exception(error)


def strip_launcher_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the frames without the leading ones of gpu_launch and of torch's `record`; None if there are no others."""
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__spec__")
        if getattr(module, "name", None) not in _LAUNCHER_MODULES:
            break
        trace = trace.tb_next
    return trace


def _exit(code: int) -> NoReturn:
    """Do what the interpreter does before its teardown, then exit."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    flushed = [_flush(file) for file in (sys.stdout, sys.stderr)]
    if not all(flushed):
        code = 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _flush(file: Any) -> bool:
    """Flush a stream and return True if no data was lost."""
    try:
        if file is not None and not file.closed:
            file.flush()
    except (OSError, ValueError):
        return False
    return True
