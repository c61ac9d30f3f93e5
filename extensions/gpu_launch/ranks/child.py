"""A forked process becomes a rank: it sees what one that torchrun started would see."""

from __future__ import annotations

import atexit
import contextlib
import linecache
import multiprocessing.process
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from importlib.machinery import FileFinder
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from gpu_launch import processes
from gpu_launch.ranks import native, script, threads
from gpu_launch.ranks.protocol import Kind, RankOrder

#: Python ignores these; a program that is started expects them as they were.
_IGNORED = ("SIGPIPE", "SIGXFSZ")
#: torchrun handles these itself, so that its ranks have them as at first even where whoever started it ignores them.
_TAKEN = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: With which every process begins in versions of torch that do not take a random one.
_FIXED_SEED = 67280421310721
#: What a script's folder may not replace: it is compiled in, or half of it is in use.
_FIXED = frozenset({"torch", "numpy", *sys.stdlib_module_names})


def separate(server: int) -> None:
    """Right after the fork: a session of its own that ends with `server`, with nobody's signal handlers.

    Signals stay blocked until there is somebody to take them.
    """
    native.die_with_parent(signal.SIGKILL, server)
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *_TAKEN):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def listen_to_signals() -> None:
    """Take those that came since the fork."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())


def become(order: RankOrder, *, path: Sequence[str], generator: Any) -> NoReturn:
    """Run the order, and end as Python would.

    `path` is what `sys.path` has of its own, without folders of scripts and PYTHONPATH; `generator` is the state of
    torch's random numbers before anything could use it.
    """
    for name, number in ((order.stdout, 1), (order.stderr, 2)):
        opened = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(order.environ)
    native.show_as(processes.MARK, order.environ.get(processes.MARK, ""))
    try:
        os.chdir(order.cwd)
        if order.kind is Kind.PROGRAM:
            _execute(order.command)
    except OSError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        os._exit(127 if order.kind is Kind.PROGRAM else 1)
    _refresh(order, path, generator)
    _end(_run(order))


def _execute(command: Sequence[str]) -> NoReturn:
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    listen_to_signals()
    os.execvp(command[0], tuple(command))  # noqa: S606 - as torchrun does


def _refresh(order: RankOrder, path: Sequence[str], generator: Any) -> None:
    """Bring what libraries learnt when they were imported up to this process."""
    given = [os.path.abspath(entry) for entry in order.environ.get("PYTHONPATH", "").split(os.pathsep)]  # noqa: PTH100
    entries = [*(given if order.environ.get("PYTHONPATH") else []), *path]
    # The first is the script's, see `script.run`.
    sys.path[:] = [os.getcwd(), *dict.fromkeys(entries)]  # noqa: PTH109 - a string
    switch = ["-m"] if order.kind is Kind.MODULE else []
    sys.orig_argv = [sys.executable, "-u", *switch, *order.command]
    for finder in sys.path_importer_cache.values():
        if isinstance(finder, FileFinder):
            finder.invalidate_caches()
    linecache.clearcache()
    time.tzset()
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]  # noqa: PTH109
    multiprocessing.process.current_process().authkey = os.urandom(32)
    _unload_shadowed(order)
    # Python's own random numbers begin anew after a fork; numpy's do not.
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()
    torch = sys.modules["torch"]
    if torch.initial_seed() == _FIXED_SEED:
        torch.default_generator.set_state(generator)
    else:
        torch.default_generator.seed()
    threads.apply(order.environ)


def _unload_shadowed(order: RankOrder) -> None:
    """Forget modules for which the script's own folder has others of the same name."""
    folder = Path(order.command[0]).resolve().parent if order.kind is Kind.SCRIPT else Path.cwd()
    try:
        own = {entry.stem for entry in folder.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").exists()}
    except OSError:
        return
    names = own.intersection(name for name in sys.modules if "." not in name) - _FIXED - {"__main__", "gpu_launch"}
    for name in names:
        file = getattr(sys.modules[name], "__file__", None)
        if file is None or not Path(file).is_relative_to(folder):
            _forget(name)


def _forget(name: str) -> None:
    for loaded in [loaded for loaded in sys.modules if loaded == name or loaded.startswith(f"{name}.")]:
        del sys.modules[loaded]


def _run(order: RankOrder) -> int:
    """Run the script under torch's `record`; its exit code, or minus the signal to end by."""
    from torch.distributed.elastic.multiprocessing.errors import record

    exchange = Path(order.exchange) if order.exchange else None
    try:
        listen_to_signals()
        record(script.run)(order.command, module=order.kind is Kind.MODULE, exchange=exchange)
    except SystemExit as end:
        return _exit_code(end.code)
    except BaseException as error:  # noqa: BLE001 - the rank's outermost edge: what Python itself does there
        _show(error)
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


def _show(error: BaseException) -> None:
    """As Python does with an uncaught exception, a hook of the script's own included."""
    error.__traceback__ = _from_script(error.__traceback__)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as second:  # noqa: BLE001 - neither may keep the rank from ending
        with contextlib.suppress(Exception):
            sys.stderr.write("Error in sys.excepthook:\n")
            traceback.print_exception(second)
            sys.stderr.write("\nOriginal exception was:\n")
            traceback.print_exception(error)


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames in front that are ours and torch's `record`."""
    ours = {__file__, script.__file__, sys.modules["torch.distributed.elastic.multiprocessing.errors"].__file__}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _end(code: int) -> NoReturn:
    """What the interpreter does at its end, but for taking itself apart: with torch that costs a fifth of a second."""
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
    """Whether nothing was lost."""
    try:
        if file is not None and not file.closed:
            file.flush()
    except (OSError, ValueError):
        return False
    return True
