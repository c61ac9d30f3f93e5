"""gpu_launch: torchrun over several nodes from a notebook cell.

`%load_ext gpu_launch` gives `%gpu_launch`, `%%gpu_launch` and the other magics; `gpu_launch.run` is the same as a
function, and runs functions too. `gpu_launch.report` is for the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_launch.errors import BrokerError, GpuLaunchError, LaunchFailed, LaunchInterrupted, NetworkError, UsageError
from gpu_launch.options import command as _command
from gpu_launch.report import report

if TYPE_CHECKING:
    from gpu_launch.common.exchange import ExchangeFiles
    from gpu_launch.launch.state import LaunchResult

__all__ = [
    "BrokerError",
    "GpuLaunchError",
    "LaunchFailed",
    "LaunchInterrupted",
    "NetworkError",
    "UsageError",
    "load_ipython_extension",
    "report",
    "run",
]

_BEFORE = dict(os.environ)


def load_ipython_extension(shell: Any) -> None:
    """Register the magics; nothing heavy is imported before the first launch."""
    from gpu_launch.magics import magics

    magics.register(shell)


def run(
    script: str | Path | Callable[..., Any],
    arguments: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
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
    send: Mapping[str, Any] | None = None,
    returns: Sequence[str] = (),
    preload: Sequence[str] = (),
    cold: bool = False,
    keep: str | None = None,
) -> LaunchResult:
    """Run `script` with torchrun over `nnodes` nodes, as `%gpu_launch` does; return when all ranks have ended well.

    A function instead of a script is called in every rank with `arguments` and `kwargs`; what it returns is in
    `LaunchResult.results`, by rank. A script's `arguments` are its own, such as `["--epochs", 2]`. `send` gives ranks
    variables by name, `returns` names those that are copied to `LaunchResult.returned`. Everything else is as in
    `%gpu_launch --help`: `nnodes="1:3"`, `model=["RTX 5090", "RTX 5070"]`, `memory="24G"`, `time_limit="2h"`.

    All workers are freed in every case.

    Raises:
        UsageError: before anything is asked for.
        LaunchFailed: with the failing rank's traceback.
        LaunchInterrupted: (a KeyboardInterrupt) after the user's interrupt.
    """
    from gpu_launch.launch.launch import launch

    if isinstance(arguments, str) or not isinstance(arguments, Sequence):
        raise UsageError(f'the script\'s arguments are a list, such as ["--epochs", "2"], not {arguments!r}')
    function = script if callable(script) else None
    if kwargs and function is None:
        raise UsageError(f"kwargs are for a function, and {script} is a script; its arguments are a list")
    if function is not None and (module or no_python):
        raise UsageError("module and no_python are for scripts, and this is a function")
    keywords = {
        "nnodes": nnodes,
        "nproc_per_node": nproc_per_node,
        "module": module,
        "no_python": no_python,
        "model": model or None,
        "memory": memory,
        "same_model": same_model,
        "exclusive": exclusive,
        "scavenge": scavenge,
        "priority": priority,
        "time_limit": time_limit,
        "timeout_s": timeout_s,
        "max_restarts": max_restarts,
        "log_dir": log_dir,
        "send": tuple(send or ()),
        "returns": returns,
        "preload": preload,
        "cold": cold,
        "keep": keep,
    }
    if function is None:
        options = _command.build_from_keywords(
            keywords, script=str(script), arguments=[str(word) for word in arguments]
        )
        return launch(options, before=_BEFORE, exchange=_exchange(send, options.returns, None))
    from gpu_launch.common.exchange import FunctionCall

    call = FunctionCall(function=function, arguments=tuple(arguments), keywords=dict(kwargs or {}))
    options = _command.build_from_keywords(keywords)
    # The script of every rank is this line; then the rank calls the function, see `worker.rank_main`.
    cell = f"# gpu_launch.run calls {call.name} here.\n"
    return launch(options, cell=cell, before=_BEFORE, exchange=_exchange(send, options.returns, call))


def _exchange(send: Mapping[str, Any] | None, returns: Sequence[str], call: Any) -> ExchangeFiles | None:
    if not (send or returns or call):
        return None
    from gpu_launch.common import exchange
    from gpu_launch.magics import magics

    return exchange.build_exchange(send=send, returns=returns, call=call, labels=magics.labels_here())
