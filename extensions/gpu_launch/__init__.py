"""gpu_launch: torchrun over several nodes from a notebook cell.

`%load_ext gpu_launch` gives `%gpu_launch` and `%%gpu_launch`; `gpu_launch.run` is the same as a function.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_launch import options as _options
from gpu_launch.errors import BrokerError, GpuLaunchError, LaunchFailed, LaunchInterrupted, NetworkError, UsageError

if TYPE_CHECKING:
    from gpu_launch.launch import LaunchResult

__all__ = [
    "BrokerError",
    "GpuLaunchError",
    "LaunchFailed",
    "LaunchInterrupted",
    "NetworkError",
    "UsageError",
    "load_ipython_extension",
    "run",
]

_BEFORE = dict(os.environ)


def load_ipython_extension(shell: Any) -> None:
    """Register the magics. Cheap: nothing heavy is imported before the first launch."""
    from gpu_launch.magics import GpuLaunchMagics

    shell.register_magics(GpuLaunchMagics)


def run(
    script: str | Path,
    arguments: Sequence[object] = (),
    *,
    nnodes: int = 1,
    nproc_per_node: int = 1,
    module: bool = False,
    no_python: bool = False,
    model: str | None = None,
    timeout_s: float | None = None,
    max_restarts: int = 0,
    log_dir: str | Path | None = None,
) -> LaunchResult:
    """Run `script` with torchrun over `nnodes` nodes, as `%gpu_launch` does; returns when all ranks have ended well.

    `arguments` are the script's own, such as `["--epochs", 2]`.

    Raises UsageError before anything is asked for, LaunchFailed with the failing rank's traceback, and
    LaunchInterrupted (a KeyboardInterrupt); everything asked for is freed in every case.
    """
    from gpu_launch.launch import launch

    if isinstance(arguments, str) or not isinstance(arguments, Sequence):
        raise UsageError(f'the script\'s arguments are a list, such as ["--epochs", "2"], and {arguments!r} is none')

    values = {
        "--nnodes": nnodes,
        "--nproc-per-node": nproc_per_node,
        "--max-restarts": max_restarts,
        "--model": model,
        "--timeout-s": timeout_s,
        "--log-dir": log_dir,
    }
    words = [f"{flag}={value}" for flag, value in values.items() if value is not None]
    words += [flag for flag, is_on in {"--module": module, "--no-python": no_python}.items() if is_on]
    wanted = _options.parse_words([*words, "--", str(script), *map(str, arguments)])
    return launch(wanted, before=_BEFORE)
