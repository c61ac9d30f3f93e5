"""Runs torchrun for the agent and records which ranks failed.

The agent sends one line of JSON on stdin: `{"argv": [...], "shutdown_s": null, "environ": {...}, "cwd": "", "failures":
"path"}`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from gpu_launch.worker import log_files
from gpu_launch.worker.forkserver import linux


def main() -> int:
    """Run torchrun and write the failed ranks to the given file."""
    # SIGTERM makes torchrun end its ranks when the engine was killed.
    linux.die_with_parent(signal.SIGTERM, os.getppid())
    problem = _import_torchrun()
    start = json.loads(sys.stdin.readline())
    # Ranks inherit an empty stdin instead of this pipe.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(start["cwd"])
    if problem:
        sys.stderr.write(problem)
        return 1
    return _run_torchrun(start["argv"], start["shutdown_s"], Path(start["failures"]))


def _import_torchrun() -> str:
    try:
        import torch.distributed.run  # noqa: F401
    except ImportError as error:
        return f"PyTorch cannot be imported with {sys.executable}: {error}\n"
    return ""


def _run_torchrun(argv: list[str], shutdown_s: int | None, failures: Path) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if shutdown_s is not None and "--shutdown-timeout" in run.get_args_parser().format_help():
        # First, so that the user's own flag takes precedence. Older torchruns lack the flag and wait for 30 s.
        argv = [f"--shutdown-timeout={shutdown_s}", *argv]
    try:
        # As torchrun's `main`, but without its own summary of the failure.
        run.run(run.parse_args(argv))
    except ChildFailedError as error:
        failures.write_text(json.dumps(_collect_failures(error)))
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _collect_failures(error: Any) -> dict[str, Any]:
    """Return exit codes and tracebacks by global rank."""
    failures = {}
    for rank, failure in error.failures.items():
        failures[str(rank)] = {
            "exit_code": failure.exitcode,
            "error": log_files.read_error_file(Path(failure.error_file)),
        }
    return failures


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter teardown with torch takes a fifth of a second and has no benefit here.
    os._exit(exit_code)
