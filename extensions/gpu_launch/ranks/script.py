"""Runs a rank's script or module as Python itself would, with variables of the notebook, and brings others back.

`python -m gpu_launch.ranks.script [--exchange DIR] [-m] SCRIPT ARGUMENTS`, or `run` in a process that was forked.
Also holds to the container's part of a GPU, see `memory_cap`.
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
from typing import Any

from gpu_launch import exchange as files
from gpu_launch import memory_cap, pickles


def main() -> None:
    """Run what the command line names; it ends as Python's own does."""
    words = sys.argv[1:]
    folder = None
    if words[:1] == ["--exchange"]:
        folder, words = Path(words[1]), words[2:]
    is_module = words[:1] == ["-m"]
    run(words[1:] if is_module else words, module=is_module, exchange=folder)


def run(command: Sequence[str], *, module: bool, exchange: Path | None) -> None:
    """Run `command` (a script or module and its arguments) as `__main__`; what it raises is raised, SystemExit too.

    `sys.path[0]` is taken for Python's own entry, and becomes the script's folder. Sets `sys.excepthook` to one that
    leaves our own frames out, and shows a cell's lines.
    """
    memory_cap.install()
    sys.excepthook = show
    main = ModuleType("__main__")
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={}, __cached__=None)
    sys.modules["__main__"] = main
    sys.argv = list(command)
    cell = _learn_sources(exchange)
    try:
        code = _module_code(main, command[0]) if module else _script_code(main, command[0], cell)
        _run(main, code, exchange)
    except BaseException as error:
        error.__traceback__ = own_part(error.__traceback__)
        raise


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write an uncaught exception as Python does, from the script's first frame on."""
    del kind
    traceback.print_exception(error.with_traceback(own_part(trace)))


def own_part(trace: TracebackType | None) -> TracebackType | None:
    """The frames from the script's or the called function's first one on; all of them where there is none."""
    beyond, found = False, trace
    while found is not None:
        is_ours = found.tb_frame.f_code.co_filename == __file__
        if beyond and not is_ours:
            return found
        beyond = beyond or is_ours
        found = found.tb_next
    return trace


def _run(main: ModuleType, code: CodeType, exchange: Path | None) -> None:
    """The script, then the function if there is one, then what is to come back."""
    if exchange is not None:
        vars(main).update(_load(exchange / files.SEND, "what --send gave cannot be read in the rank") or {})
    ended: SystemExit | None = None
    try:
        exec(code, vars(main))  # noqa: S102 - the user's own script
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        ended = error
    if exchange is not None:
        _finish(main, exchange)
    if ended is not None:
        raise ended


def _finish(main: ModuleType, exchange: Path) -> None:
    call = _load(exchange / files.CALL, "the function cannot be read in the rank")
    names = json.loads((exchange / files.RETURNS).read_text()) if (exchange / files.RETURNS).exists() else []
    told: dict[str, Any] = {"result": None, "returned": {}, "problems": []}
    if call is not None:
        function, arguments, keywords = call
        _adopt(main, function)
        told["result"] = _packed("the result", function(*arguments, **keywords), told["problems"])
    for name in names:
        if name in vars(main):
            told["returned"][name] = _packed(name, vars(main)[name], told["problems"])
        else:
            told["problems"].append(f"the script has no variable {name} at its end")
    if call is not None or names:
        _write(exchange / f"result-{os.environ.get('RANK', '0')}.pkl", told)


def _adopt(main: ModuleType, function: Callable[..., Any]) -> None:
    """Put the notebook's function and the globals that came with it into `__main__`.

    There pickle looks classes up, when the function saves a model or starts a DataLoader's workers.
    """
    if getattr(function, "__module__", None) == "__main__":
        came: Mapping[str, Any] = getattr(function, "__globals__", {})
        vars(main).update({name: value for name, value in came.items() if not name.startswith("__")})
        vars(main).setdefault(getattr(function, "__name__", ""), function)


def _packed(name: str, value: Any, problems: list[str]) -> bytes | None:
    try:
        return pickles.dump(value, name)
    except pickles.CannotPickle as error:
        problems.append(str(error))
    except pickles.TooLarge:
        problems.append(f"{name} has more than {pickles.MOST_BYTES // 1024**3} GiB; let the script save it to a file")
    return None


def _write(path: Path, told: dict[str, Any]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(pickle.dumps(told))
    draft.replace(path)


def _load(path: Path, problem: str) -> Any:
    """A file of the exchange; None where there is none."""
    if not path.exists():
        return None
    try:
        return pickles.load(path.read_bytes())
    except Exception as error:
        error.add_note(f"gpu_launch: {problem}")
        raise


def _learn_sources(exchange: Path | None) -> dict[str, Any] | None:
    """Let tracebacks show the notebook's cells; how this script's own cell is called, where it is one."""
    if exchange is None or not (exchange / files.SOURCES).exists():
        return None
    told = json.loads((exchange / files.SOURCES).read_text())
    for label, text in told["sources"].items():
        # No time: linecache never looks for a file of that name.
        linecache.cache[label] = (len(text), None, text.splitlines(keepends=True), label)
    cell: dict[str, Any] | None = told["cell"]
    return cell


def _script_code(main: ModuleType, name: str, cell: dict[str, Any] | None) -> CodeType:
    path = Path(name)
    # As Python has it: a whole path, with links, `.` and `..` in it as they are.
    whole = name if path.is_absolute() else f"{Path.cwd()}/{name}"
    if path.is_dir() or zipfile.is_zipfile(path):
        return _archive_code(main, whole)
    _set_path(str(path.resolve().parent))
    loader: Any
    if path.suffix == ".pyc":
        loader = importlib.machinery.SourcelessFileLoader("__main__", whole)
        found = loader.get_code("__main__")
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", whole)
        with io.open_code(whole) as opened:
            source = opened.read()
        # A cell's lines have the numbers that the notebook shows.
        source = source if cell is None else b"\n" * cell["skipped"] + source
        found = compile(source, whole if cell is None else cell["label"], "exec", dont_inherit=True)
    vars(main).update(__file__=whole, __loader__=loader, __package__=None, __spec__=None)
    code: CodeType = found
    return code


def _archive_code(main: ModuleType, name: str) -> CodeType:
    """`__main__` of a folder or zip file, which comes first on the path."""
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
