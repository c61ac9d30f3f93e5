"""What a user's `~/.bashrc` gives to the commands of a task file: variables and functions.

Debian's own `~/.bashrc` ends at once in a shell that is not interactive, so an interactive one reads it, apart from the
commands: an interactive bash ignores SIGTERM, and prints messages about job control.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: Maximum time that a `~/.bashrc` may take, seconds.
TIMEOUT_S = 30.0
#: Variables of the shell that read the file.
_OWN = frozenset({"_", "SHLVL", "PWD", "OLDPWD", "PS1", "PS2", "PROMPT_COMMAND", "COLUMNS", "LINES"})
#: Functions are parsed with the options for patterns that completion scripts use.
_DUMP = 'env -0 >"$1"; { echo "shopt -s extglob"; declare -f; shopt -p extglob || true; } >"$2"'
_ENVIRON, _FUNCTIONS = "environ", "functions.sh"


@dataclass(frozen=True, kw_only=True)
class ShellState:
    """Variables and functions of a shell."""

    environ: dict[str, str] = field(default_factory=dict)
    #: A file that defines the functions; None for none.
    functions: Path | None = None


def read_bashrc(
    environ: Mapping[str, str],
    *,
    kept: Collection[str],
    folder: Path,
    on_start: Callable[[int], None] = lambda group: None,
    timeout_s: float = TIMEOUT_S,
) -> ShellState:
    """Return what the commands have after the `~/.bashrc`: `environ` where it is missing, fails or takes too long.

    Args:
        environ: Variables of the commands.
        kept: Names of variables that the file cannot change.
        folder: An empty folder for what bash writes, which the functions need until the commands have begun.
        on_start: Called with the process group of the bash that reads the file.
        timeout_s: Longest time, in seconds.
    """
    if not (Path(environ.get("HOME", "/")) / ".bashrc").is_file():
        return ShellState(environ=dict(environ))
    # What the file prints is for terminals. The functions are written last: they show that the rest is complete.
    bash = subprocess.Popen(
        ["bash", "-i", "-c", _DUMP, "bash", str(folder / _ENVIRON), str(folder / _FUNCTIONS)],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    on_start(bash.pid)
    try:
        code = bash.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(bash.pid, signal.SIGKILL)
        bash.wait()
    read = _take_environ(folder / _ENVIRON)
    if code != 0 or not (folder / _FUNCTIONS).is_file():
        return ShellState(environ=dict(environ))
    fixed = _OWN | set(kept)
    return ShellState(
        environ={name: value for name, value in read.items() if name not in fixed}
        | {name: value for name, value in environ.items() if name in fixed},
        functions=folder / _FUNCTIONS,
    )


def _take_environ(path: Path) -> dict[str, str]:
    """Return the variables in a file of `env -0`, and remove it: it has the values of secrets."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    path.unlink()
    pairs = (os.fsdecode(item).partition("=") for item in data.split(b"\0") if item)
    return {name: value for name, _, value in pairs}
