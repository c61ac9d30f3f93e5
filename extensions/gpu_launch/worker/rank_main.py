"""Runs a rank's script or module as Python itself would, and exchanges variables with the notebook.

`python -m gpu_launch.worker.rank_main [--exchange DIR] [-m] SCRIPT ARGUMENTS`, or `run_command` in a forked process.
Also applies the memory cap of a GPU share, see `memory_cap`, the mode of `--comm`, see `ddp_communication`, the size of
DDP's buckets, see `ddp_buckets`, and the profile of `--predict`, see `step_profiler`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import json
import linecache
import os
import pickle
import sys
import traceback
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from gpu_launch.common import exchange as exchange_files
from gpu_launch.common import memory_cap
from gpu_launch.common.run_folder import write_private
from gpu_launch.prediction import step_profiler
from gpu_launch.training import ddp_buckets, ddp_communication
from gpu_launch.worker import jax_cluster, process_exit, rank_debugger, rank_displays, rank_stacks


def main() -> NoReturn:
    """Run the command line's script; the process ends as under Python itself."""
    words = sys.argv[1:]
    folder = None
    if words[:1] == ["--exchange"]:
        folder, words = Path(words[1]), words[2:]
    is_module = words[:1] == ["-m"]
    command = words[1:] if is_module else words
    process_exit.run_and_exit(lambda: run_command(command, module=is_module, exchange_dir=folder))


def run_command(command: Sequence[str], *, module: bool, exchange_dir: Path | None) -> None:
    """Run `command` (a script or module and its arguments) as `__main__`.

    `sys.path[0]` is taken for Python's own entry and replaced by the script's folder. `sys.excepthook` is replaced by
    one that leaves out frames of gpu_launch and shows the lines of cells. Exceptions pass through, SystemExit too.
    """
    memory_cap.install()
    rank_stacks.install(os.environ)
    debugger = rank_debugger.install(os.environ)
    ddp_communication.install()
    ddp_buckets.install()
    step_profiler.install()
    jax_cluster.install()
    sys.excepthook = show_exception
    main = ModuleType("__main__")
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={}, __cached__=None)
    sys.modules["__main__"] = main
    sys.argv = list(command)
    cell = _register_sources(exchange_dir)
    rank_displays.install(is_cell=cell is not None)
    try:
        code = _module_code(main, command[0]) if module else _script_code(main, command[0], cell)
        _execute(main, code, exchange_dir)
        if cell is not None:
            rank_displays.end_cell()
    except BaseException as error:
        error.__traceback__ = process_exit.strip_launcher_frames(error.__traceback__) or error.__traceback__
        if debugger is not None:
            debugger.stop_after_failure(error)
        raise


def show_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write an uncaught exception as Python does, beginning with the script's first frame."""
    del kind
    traceback.print_exception(error.with_traceback(process_exit.strip_launcher_frames(trace) or trace))


def _execute(main: ModuleType, code: CodeType, exchange: Path | None) -> None:
    """Run the script, then the function if there is one, then write the results."""
    if exchange is not None:
        vars(main).update(
            _load_file(exchange / exchange_files.SEND, "what --send gave cannot be read in the rank") or {}
        )
    ended: SystemExit | None = None
    try:
        exec(code, vars(main))  # noqa: S102 - the user's own script
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        ended = error
    if exchange is not None:
        _write_result(main, exchange)
    if ended is not None:
        raise ended


def _write_result(main: ModuleType, exchange: Path) -> None:
    call = _load_file(exchange / exchange_files.CALL, "the function cannot be read in the rank")
    names = (
        json.loads((exchange / exchange_files.RETURNS).read_text())
        if (exchange / exchange_files.RETURNS).exists()
        else []
    )
    outcome: dict[str, Any] = {"result": None, "returned": {}, "problems": []}
    if call is not None:
        function, arguments, keywords = call
        _merge_globals(main, function)
        outcome["result"] = _pickle_value("the result", function(*arguments, **keywords), outcome["problems"])
    for name in names:
        if name in vars(main):
            outcome["returned"][name] = _pickle_value(name, vars(main)[name], outcome["problems"])
        else:
            outcome["problems"].append(f"the script has no variable {name} at its end")
    if call is not None or names:
        write_private(exchange / f"result-{os.environ.get('RANK', '0')}.pkl", pickle.dumps(outcome))


def _merge_globals(main: ModuleType, function: Callable[..., Any]) -> None:
    """Put the notebook's function and the globals that were sent with it into `__main__`.

    pickle looks up classes there when the function saves a model or starts a DataLoader's workers.
    """
    if getattr(function, "__module__", None) == "__main__":
        sent_globals: Mapping[str, Any] = getattr(function, "__globals__", {})
        vars(main).update({name: value for name, value in sent_globals.items() if not name.startswith("__")})
        vars(main).setdefault(getattr(function, "__name__", ""), function)


def _pickle_value(name: str, value: Any, problems: list[str]) -> bytes | None:
    try:
        return exchange_files.dump_value(value, name)
    except exchange_files.CannotPickle as error:
        problems.append(str(error))
    except exchange_files.TooLarge:
        problems.append(
            f"{name} has more than {exchange_files.MAX_BYTES // 1024**3} GiB; let the script save it to a file"
        )
    return None


def _load_file(path: Path, problem: str) -> Any:
    """Load a file of the exchange, None if it does not exist."""
    if not path.exists():
        return None
    try:
        return exchange_files.load_value(path.read_bytes())
    except Exception as error:
        error.add_note(f"gpu_launch: {problem}")
        raise


def _register_sources(exchange: Path | None) -> dict[str, Any] | None:
    """Make tracebacks show the notebook's cells; return the description of this script's own cell, if it is one."""
    if exchange is None or not (exchange / exchange_files.SOURCES).exists():
        return None
    sources = json.loads((exchange / exchange_files.SOURCES).read_text())
    for label, text in sources["sources"].items():
        # Without a time, linecache never checks for a file of that name.
        linecache.cache[label] = (len(text), None, text.splitlines(keepends=True), label)
    cell: dict[str, Any] | None = sources["cell"]
    return cell


def _script_code(main: ModuleType, name: str, cell: dict[str, Any] | None) -> CodeType:
    path = Path(name)
    # An absolute path with its links, `.` and `..`, as Python has it.
    full_path = name if path.is_absolute() else f"{Path.cwd()}/{name}"
    if path.is_dir() or zipfile.is_zipfile(path):
        return _archive_code(main, full_path)
    _set_path(str(path.resolve().parent))
    loader: Any
    if path.suffix == ".pyc":
        loader = importlib.machinery.SourcelessFileLoader("__main__", full_path)
        code_object = loader.get_code("__main__")
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", full_path)
        with io.open_code(full_path) as opened:
            source = opened.read()
        # Line numbers of a cell match the notebook's.
        source = source if cell is None else b"\n" * cell["skipped"] + source
        code_object = compile(source, full_path if cell is None else cell["label"], "exec", dont_inherit=True)
    vars(main).update(__file__=full_path, __loader__=loader, __package__=None, __spec__=None)
    code: CodeType = code_object
    return code


def _archive_code(main: ModuleType, name: str) -> CodeType:
    """Return the code of `__main__` in a folder or zip file, which becomes the first entry of the path."""
    _set_path(name)
    return _spec_code(main, importlib.machinery.PathFinder.find_spec("__main__", [name]), name)


def _module_code(main: ModuleType, name: str) -> CodeType:
    _set_path(str(Path.cwd()))
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = _spec_code(main, spec, name)
    sys.argv[0] = str(spec.origin if spec is not None else name)
    return code


def _spec_code(main: ModuleType, spec: importlib.machinery.ModuleSpec | None, name: str) -> CodeType:
    loader: Any = spec.loader if spec is not None else None
    code: CodeType | None = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise ImportError(f"No module named {name} that can be run")
    vars(main).update(
        __file__=spec.origin, __cached__=spec.cached, __loader__=loader, __package__=spec.parent, __spec__=spec
    )
    return code


def _set_path(entry: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = entry


if __name__ == "__main__":
    main()
