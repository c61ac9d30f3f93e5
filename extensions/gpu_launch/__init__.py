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
    nnodes: int | str = 1,
    nproc_per_node: int = 1,
    module: bool = False,
    no_python: bool = False,
    model: str | Sequence[str] | None = None,
    memory: str | None = None,
    same_model: bool = False,
    exclusive: bool = False,
    scavenge: bool = False,
    priority: int | None = None,
    time_limit: str | None = None,
    timeout_s: float | None = None,
    max_restarts: int = 0,
    log_dir: str | Path | None = None,
) -> LaunchResult:
    """Run `script` with torchrun over `nnodes` nodes, as `%gpu_launch` does; returns when all ranks have ended well.

    `arguments` are the script's own, such as `["--epochs", 2]`; everything else is as in `%gpu_launch --help`:
    `nnodes="1:3"`, `model=["RTX 5090", "RTX 5070"]`, `memory="24G"`, `time_limit="2h"`.

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
        "--model": model if model is None or isinstance(model, str) else ",".join(model),
        "--memory": memory,
        "--priority": priority,
        "--time-limit": time_limit,
        "--timeout-s": timeout_s,
        "--log-dir": log_dir,
    }
    words = [f"{flag}={value}" for flag, value in values.items() if value is not None]
    switches = {
        "--module": module,
        "--no-python": no_python,
        "--same-model": same_model,
        "--exclusive": exclusive,
        "--scavenge": scavenge,
    }
    words += [flag for flag, is_on in switches.items() if is_on]
    wanted = _options.parse_words([*words, "--", str(script), *map(str, arguments)])
    return launch(wanted, before=_BEFORE)
