"""Turns a forked process into a rank that sees the same environment as one started by torchrun."""

from __future__ import annotations

import ctypes
import linecache
import multiprocessing.process
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from importlib.machinery import FileFinder
from pathlib import Path
from typing import Any, NoReturn

from gpu_launch.worker import process_exit, processes, rank_main
from gpu_launch.worker.forkserver.protocol import CommandKind, RankSpec

_CPUS = Path("/sys/devices/system/cpu")
#: Names in numpy's and scipy's OpenBLAS, and in that of Linux distributions.
_OPENBLAS_SETTERS = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads")
#: Python ignores these signals; a program that is executed expects the default handlers.
_IGNORED_SIGNALS = ("SIGPIPE", "SIGXFSZ")
#: torchrun handles these itself. So its ranks have the default handlers even if torchrun's parent ignores them.
_RESET_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: The seed of every new process in torch versions that do not draw a random one.
_DEFAULT_SEED = 67280421310721
#: Modules that a script's folder cannot replace: they are compiled in, or partly in use already.
_NEVER_UNLOADED = frozenset({"torch", "numpy", *sys.stdlib_module_names})


def detach_from_server(server: int) -> None:
    """Move a process that was just forked into a session of its own, with default signal handlers.

    The process dies with the process `server`. Signals stay blocked until `unblock_signals`.
    """
    processes.die_with_parent(signal.SIGKILL, server)
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *_RESET_SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def unblock_signals() -> None:
    """Deliver the signals that arrived since the fork."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())


def become_rank(spec: RankSpec, *, path: Sequence[str], generator: Any) -> NoReturn:
    """Run the rank's command and exit as Python would.

    Args:
        spec: The rank's command, environment and log files.
        path: Entries of `sys.path` without scripts' folders and PYTHONPATH.
        generator: State of torch's random numbers before any use.
    """
    for name, number in ((spec.stdout, 1), (spec.stderr, 2)):
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(spec.environ)
    processes.set_visible_variable(processes.MARK_VARIABLE, spec.environ.get(processes.MARK_VARIABLE, ""))
    try:
        os.chdir(spec.cwd)
        if spec.kind is CommandKind.PROGRAM:
            _exec_program(spec.command)
    except OSError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        os._exit(127 if spec.kind is CommandKind.PROGRAM else 1)
    _reset_inherited_state(spec, path, generator)
    process_exit.run_and_exit(lambda: _run_script(spec))


def _exec_program(command: Sequence[str]) -> NoReturn:
    for name in _IGNORED_SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    unblock_signals()
    os.execvp(command[0], tuple(command))  # noqa: S606 - as torchrun does


def _reset_inherited_state(order: RankSpec, path: Sequence[str], generator: Any) -> None:
    """Reset what libraries cached at import to the state of a new process."""
    user_path = [os.path.abspath(entry) for entry in order.environ.get("PYTHONPATH", "").split(os.pathsep)]  # noqa: PTH100
    entries = [*(user_path if order.environ.get("PYTHONPATH") else []), *path]
    # The first entry belongs to the script, see `rank_main.run_command`.
    sys.path[:] = [os.getcwd(), *dict.fromkeys(entries)]  # noqa: PTH109 - a string
    switch = ["-m"] if order.kind is CommandKind.MODULE else []
    sys.orig_argv = [sys.executable, "-u", *switch, *order.command]
    for finder in sys.path_importer_cache.values():
        if isinstance(finder, FileFinder):
            finder.invalidate_caches()
    linecache.clearcache()
    time.tzset()
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]  # noqa: PTH109
    multiprocessing.process.current_process().authkey = os.urandom(32)
    _unload_shadowed(order)
    # Python reseeds its own random numbers after a fork; numpy does not.
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()
    torch = sys.modules["torch"]
    if torch.initial_seed() == _DEFAULT_SEED:
        torch.default_generator.set_state(generator)
    else:
        torch.default_generator.seed()
    apply_thread_counts(order.environ)


def _unload_shadowed(order: RankSpec) -> None:
    """Unload modules if the script's own folder has others with the same name."""
    folder = Path(order.command[0]).resolve().parent if order.kind is CommandKind.SCRIPT else Path.cwd()
    try:
        own_modules = {
            entry.stem for entry in folder.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").exists()
        }
    except OSError:
        return
    names = (
        own_modules.intersection(name for name in sys.modules if "." not in name)
        - _NEVER_UNLOADED
        - {"__main__", "gpu_launch"}
    )
    for name in names:
        file = getattr(sys.modules[name], "__file__", None)
        if file is None or not Path(file).is_relative_to(folder):
            _forget(name)


def _forget(name: str) -> None:
    for loaded in [loaded for loaded in sys.modules if loaded == name or loaded.startswith(f"{name}.")]:
        del sys.modules[loaded]


def _run_script(order: RankSpec) -> None:
    """Run the script under torch's `record`, which writes its error where torchrun's ranks write theirs."""
    from torch.distributed.elastic.multiprocessing.errors import record

    exchange = Path(order.exchange) if order.exchange else None
    unblock_signals()
    record(rank_main.run_command)(order.command, module=order.kind is CommandKind.MODULE, exchange_dir=exchange)


def choose_thread_count(environ: Mapping[str, str], *, cores: int, has_mkl: bool) -> int:
    """Return the number of threads torch would choose in a process started with `environ`."""
    names = ("MKL_NUM_THREADS", "OMP_NUM_THREADS") if has_mkl else ("OMP_NUM_THREADS",)
    for name in names:
        value = environ.get(name, "").split(",")[0].strip()
        if value.isdecimal() and int(value):
            return int(value)
    return cores


def apply_thread_counts(environ: Mapping[str, str]) -> None:
    """Set the thread counts of libraries that are imported already to those of `environ`."""
    torch = sys.modules["torch"]
    cpus = os.sched_getaffinity(0)
    has_mkl = bool(torch.backends.mkl.is_available())
    number = choose_thread_count(environ, cores=_cores(cpus) if has_mkl else len(cpus), has_mkl=has_mkl)
    if number != torch.get_num_threads():
        torch.set_num_threads(number)
    blas_threads = environ.get("OPENBLAS_NUM_THREADS") or environ.get("OMP_NUM_THREADS", "")
    blas = choose_thread_count({"OMP_NUM_THREADS": blas_threads}, cores=len(cpus), has_mkl=False)
    if blas != 1:
        _set_openblas(blas)


def _cores(cpus: Collection[int]) -> int:
    """Return the number of physical cores among these CPUs: MKL uses one thread on each."""
    siblings = set()
    for cpu in cpus:
        try:
            siblings.add((_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
        except OSError:
            return len(cpus)
    return len(siblings)


def _set_openblas(number: int) -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split()[-1] for line in maps if "openblas" in line}:
        library = ctypes.CDLL(path)
        for name in _OPENBLAS_SETTERS:
            if hasattr(library, name):
                getattr(library, name)(number)
                break
