"""torchrun, told by its agent what to run, and telling it which ranks failed.

Reads one line of JSON on stdin to know what to run:
`{"argv": [...], "shutdown_s": null, "environ": {...}, "cwd": "", "failures": "path"}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from gpu_launch.ranks import native


def main() -> int:
    """Run, and write which ranks failed."""
    # A killed engine takes its torchrun along; torchrun ends its ranks on SIGTERM.
    native.die_with_parent(signal.SIGTERM, os.getppid())
    problem = _import()
    start = json.loads(sys.stdin.readline())
    # Ranks inherit an empty stdin, not this pipe.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(start["cwd"])
    if problem:
        sys.stderr.write(problem)
        return 1
    return _run(start["argv"], start["shutdown_s"], Path(start["failures"]))


def _import() -> str:
    try:
        import torch.distributed.run  # noqa: F401
    except ImportError as error:
        return f"PyTorch cannot be imported with {sys.executable}: {error}\n"
    return ""


def _run(argv: list[str], shutdown_s: int | None, failures: Path) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if shutdown_s is not None and "--shutdown-timeout" in run.get_args_parser().format_help():
        # First, so that the user's own wins; older torchruns have no such flag, and wait for 30 s.
        argv = [f"--shutdown-timeout={shutdown_s}", *argv]
    try:
        # What torchrun's `main` does, without its own summary of the failure.
        run.run(run.parse_args(argv))
    except ChildFailedError as error:
        failures.write_text(json.dumps(_failed(error)))
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _failed(error: Any) -> dict[str, Any]:
    """Exit codes and error files by global rank."""
    found = {}
    for rank, failure in error.failures.items():
        found[str(rank)] = {"exit_code": failure.exitcode, "error": _recorded(failure.error_file)}
    return found


def _recorded(path: str) -> str:
    """The traceback a script decorated with torch's `record` left; empty where there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(Path(path).read_text())["message"]["extraInfo"]["py_callstack"])
    return ""


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking an interpreter with torch apart costs a fifth of a second, and nothing here needs it.
    os._exit(exit_code)
