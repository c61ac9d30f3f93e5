"""gpu_launch: torchrun over several nodes from a notebook cell.

`%load_ext gpu_launch` gives `%gpu_launch`, `%%gpu_launch` and the other magics; `gpu_launch.run` is the same as a
function, and runs functions too. `gpu_launch.report` is for the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_launch import options as _options
from gpu_launch.errors import BrokerError, GpuLaunchError, LaunchFailed, LaunchInterrupted, NetworkError, UsageError
from gpu_launch.report import report

if TYPE_CHECKING:
    from gpu_launch.exchange import Exchange
    from gpu_launch.launch import LaunchResult

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
    """Register the magics. Cheap: nothing heavy is imported before the first launch."""
    from gpu_launch import magics
    from gpu_launch.standing.magics import GpuRanksMagics

    magics.register(shell)
    shell.register_magics(GpuRanksMagics)


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
    """Run `script` with torchrun over `nnodes` nodes, as `%gpu_launch` does; returns when all ranks have ended well.

    A function instead of a script is called in every rank with `arguments` and `kwargs`; what it returns is in
    `LaunchResult.results`, by rank. A script's `arguments` are its own, such as `["--epochs", 2]`. `send` gives ranks
    variables by name, `returns` names those that come back in `LaunchResult.returned`. Everything else is as in
    `%gpu_launch --help`: `nnodes="1:3"`, `model=["RTX 5090", "RTX 5070"]`, `memory="24G"`, `time_limit="2h"`.

    Raises UsageError before anything is asked for, LaunchFailed with the failing rank's traceback, and
    LaunchInterrupted (a KeyboardInterrupt); everything asked for is freed in every case.
    """
    from gpu_launch.launch import launch

    if isinstance(arguments, str) or not isinstance(arguments, Sequence):
        raise UsageError(f'the script\'s arguments are a list, such as ["--epochs", "2"], and {arguments!r} is none')
    function = script if callable(script) else None
    if kwargs and function is None:
        raise UsageError(f"kwargs are for a function, and {script} is a script; its arguments are a list")
    if function is not None and (module or no_python):
        raise UsageError("module and no_python are for scripts, and this is a function")
    values = {
        "--nnodes": nnodes,
        "--nproc-per-node": nproc_per_node,
        "--max-restarts": max_restarts,
        "--model": _list(model),
        "--memory": memory,
        "--priority": priority,
        "--time-limit": time_limit,
        "--timeout-s": timeout_s,
        "--log-dir": log_dir,
        "--send": ",".join(send) if send else None,
        "--return": _list(returns),
        "--preload": _list(preload),
        "--keep": keep,
    }
    switches = {
        "--module": module,
        "--no-python": no_python,
        "--same-model": same_model,
        "--exclusive": exclusive,
        "--scavenge": scavenge,
        "--cold": cold,
    }
    words = [f"{flag}={value}" for flag, value in values.items() if value is not None]
    words += [flag for flag, is_on in switches.items() if is_on]
    if function is None:
        wanted = _options.parse_words([*words, "--", str(script), *map(str, arguments)])
        return launch(wanted, before=_BEFORE, exchange=_exchange(send, wanted.returns, None))
    from gpu_launch.exchange import Call

    call = Call(function=function, arguments=tuple(arguments), keywords=dict(kwargs or {}))
    wanted = _options.parse_words(words, cell=True)
    # The script of every rank is this line; then it calls the function, see `ranks.script`.
    cell = f"# gpu_launch.run calls {call.name} here.\n"
    return launch(wanted, cell=cell, before=_BEFORE, exchange=_exchange(send, wanted.returns, call))


def _list(value: str | Sequence[str] | None) -> str | None:
    """As a flag takes it; None for nothing."""
    return (value if isinstance(value, str) else ",".join(value)) if value else None


def _exchange(send: Mapping[str, Any] | None, returns: Sequence[str], call: Any) -> Exchange | None:
    if not (send or returns or call):
        return None
    from gpu_launch import exchange, magics

    return exchange.build(send=send, returns=returns, call=call, labels=magics.labels_here())
