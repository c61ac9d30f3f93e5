"""Flags of torchrun that a launch refuses, and pairs of options that make no sense together, with the reasons."""

from __future__ import annotations

_RENDEZVOUS = "the launch knows its nodes' addresses, and makes a store of its own for every start"
_SHOWN = "the launch reads and shows ranks' output itself: use --tee, --redirects and --local-ranks-filter"
#: torchrun's flags that a launch refuses, and why.
REFUSED = {
    "node-rank": "the launch numbers the nodes itself",
    "master-addr": _RENDEZVOUS,
    "master-port": _RENDEZVOUS,
    "local-addr": "every node's address on your own network is found",
    "rdzv-backend": _RENDEZVOUS,
    "rdzv-endpoint": _RENDEZVOUS,
    "rdzv-id": _RENDEZVOUS,
    "rdzv-conf": _RENDEZVOUS,
    "standalone": "one node is --nnodes 1, which is the default",
    "start-method": "ranks are forked from a process that has imported torch, or with --cold started by torchrun",
    "run-path": "name the script without it; it runs as __main__ in either case",
    "event-log-handler": "a launch keeps no record of torchrun's own events; %gpu_logs shows the ranks' output",
    "logs-specs": "the launch reads the log files where torchrun puts them by default; --log-dir moves them",
    "duplicate-stdout-filters": _SHOWN,
    "duplicate-stderr-filters": _SHOWN,
}
_ONE_CARD = "a prediction runs some steps on one card, and its table has all numbers of cards of the last bench"
_OUTLIVES = "a detached job runs without this notebook"
_PROGRAM = "a program has no Python variables"
#: Pairs of options that make no sense together, and why.
EXCLUDING = (
    ("module", "no_python", "the script is either a module or a program"),
    ("no_python", "send", _PROGRAM),
    ("no_python", "returns", _PROGRAM),
    ("no_python", "preload", "a program starts from nothing on every rank, so imports do not help it"),
    ("no_python", "comm", "a program's DistributedDataParallel is out of reach"),
    ("predict", "nnodes", _ONE_CARD),
    ("predict", "nproc_per_node", _ONE_CARD),
    ("predict", "max_restarts", _ONE_CARD),
    ("predict", "comm", "a prediction has all modes"),
    ("predict", "returns", "a prediction ends the script before its end"),
    ("predict", "no_python", "a program's steps are out of reach"),
    ("no_python", "debug", "a program has no Python debugger"),
    ("cold", "debug", "torchrun itself starts the ranks"),
    ("predict", "debug", "a prediction ends the script before its end"),
    ("cold", "preload", "--cold starts every rank with nothing imported"),
    ("detach", "send", f"{_OUTLIVES}, so let the script load what it needs from a file"),
    ("detach", "returns", f"{_OUTLIVES}, so let the script save its results to a file"),
    ("detach", "keep_s", f"{_OUTLIVES}, and its workers end with it"),
    ("detach", "timeout_s", f"{_OUTLIVES} and waits as long as needed; %gpu_cancel withdraws it"),
)
