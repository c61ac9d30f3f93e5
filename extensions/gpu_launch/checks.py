"""What can be refused by looking at the notebook's own files: script, module, program and working folder."""

from __future__ import annotations

import difflib
import importlib.machinery
import shutil
import sys
import warnings
from pathlib import Path

from gpu_launch.errors import UsageError
from gpu_launch.options import Options
from gpu_launch.runs import shown

#: Mounted on every node besides the home.
DATASETS = Path("/datasets")


def check_command(options: Options, *, cwd: Path, home: Path, shared: bool) -> str:
    """The script as torchrun gets it. With `shared` it must be where every node sees it."""
    if options.module:
        return _module(options.script, cwd)
    if options.no_python:
        return _program(options.script, cwd)
    script = Path(options.script).expanduser()
    path = cwd / script
    if path.is_dir():
        raise UsageError(f"{options.script} is a folder; name the script in it.")
    if not path.is_file():
        raise UsageError(f"There is no script {options.script} in {shown(cwd, home)}.{_similar(path)}")
    if shared:
        check_shared(path, home=home, what="The script")
    if path.suffix == ".py":
        check_syntax(path.read_bytes(), str(path), shown=options.script)
    return str(script)


def check_syntax(source: str | bytes, filename: str, *, shown: str) -> None:
    """Refuse what is no Python. `shown` is what a person calls it."""
    with warnings.catch_warnings():
        # The rank says them.
        warnings.simplefilter("ignore")
        try:
            compile(source, filename, "exec", dont_inherit=True)
        except SyntaxError as error:
            line = (error.text or "").strip()
            raise UsageError(f"{shown}, line {error.lineno}: {error.msg}\n    {line}".rstrip()) from None
        except ValueError as error:
            raise UsageError(f"{shown}: {error}.") from None


def check_shared(path: Path, *, home: Path, what: str) -> None:
    """Refuse a path that other nodes do not have."""
    real = path.resolve()
    if not (real.is_relative_to(home.resolve()) or real.is_relative_to(DATASETS)):
        folder = real if real.is_dir() else real.parent
        raise UsageError(f"{what} is in {folder}, which other nodes do not have. Use a folder in {home}.")


def _module(name: str, cwd: Path) -> str:
    top = name.partition(".")[0]
    is_name = all(part.isidentifier() for part in name.split("."))
    if not is_name or importlib.machinery.PathFinder.find_spec(top, [str(cwd), *sys.path]) is None:
        raise UsageError(f"There is no module {name}.")
    return name


def _program(name: str, cwd: Path) -> str:
    path = cwd / Path(name).expanduser()
    if shutil.which(name) is None and not path.is_file():
        raise UsageError(f"There is no program {name}.")
    return str(path) if path.is_file() and "/" in name else name


def _similar(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".py"]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=2)
    return f" Did you mean {' or '.join(close)}?" if close else ""
