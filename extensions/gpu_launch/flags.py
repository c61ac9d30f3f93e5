"""The flags of `%gpu_launch`: torchrun's own and ours, by name. Pure."""

from __future__ import annotations

USAGE = """\
%gpu_launch [options] script.py [script's arguments]
%%gpu_launch [options] [-- arguments]      the cell's body is the script

What takes part
  --nnodes N             nodes that take part (1); MIN:MAX starts with what is free, and goes on with less when
                         others need GPUs: the ranks get SIGTERM and start again on what is left
  --nproc-per-node N     ranks, and GPUs, a node (1)
  --model NAME[,NAME...] only GPUs of these models, best liked first, such as "RTX 5090,RTX 5070" (any)
  --memory SIZE          only GPUs with at least so much memory, such as 24G (any)
  --same-model           all GPUs of one model (mixed ones are allowed)
  --exclusive            nothing else may run on the nodes; the notebook's own GPU does not take part

When
  --scavenge             give the GPUs back when others need them: the ranks get SIGTERM and some time for a
                         checkpoint, the launch waits again and runs the same command anew
  --priority N           -100 to 100, higher goes first; above 0 for administrators (0)
  --time-limit SPAN      the longest time with the GPUs, such as 30m, 2h or 1d; a short one starts sooner
                         where it fits in before others (as the administrator set)
  --timeout-s SECONDS    give up when no GPUs were free for this long (wait without limit)
  --max-restarts N       start all ranks again after a failure, up to N times (0)
  --detach               hand it to the cluster: it goes on without this notebook; %gpu_logs and %gpu_status show it
  --dry-run              show what would be asked for and run, and do nothing

How ranks start
  -m, --module           the script is a module's name
  --no-python            the script is a program
  --preload MODULE[,MODULE...] import these, besides torch, before ranks are forked: the next launches start sooner
  --cold                 start every rank with torchrun itself, nothing imported beforehand
  --keep SPAN            the workers stay with this notebook for so long after the launch, such as 30m; 0s frees them
                         at once (as the administrator set)

The notebook's variables
  --send NAME[,NAME...]  give these variables of the notebook to the ranks
  --return NAME[,NAME...] bring these of the ranks' variables back, each as a list by rank

Output
  -t, --tee STREAMS      redirected streams that are shown as well: 1 stdout, 2 stderr, 3 both, or RANK:STREAMS,...
  -r, --redirects STREAMS  streams that go to the log files only
  --local-ranks-filter RANKS  show only these local ranks, such as 0,2
  --log-dir DIR          where log files go (~/.gpu_launch/jobs/<run>/logs)

As in torchrun: --monitor-interval, --role, --numa-binding, --signals-to-handle, --shutdown-timeout,
--virtual-local-rank
"""

#: Given to torchrun as they are, or followed where ranks are forked.
PASSED = ("monitor-interval", "role", "numa-binding", "signals-to-handle", "shutdown-timeout", "virtual-local-rank")
#: Read here, torchrun's own among them.
OURS = (
    "nnodes", "nproc-per-node", "max-restarts", "tee", "redirects", "local-ranks-filter", "log-dir", "module",
    "no-python", "model", "memory", "same-model", "exclusive", "scavenge", "priority", "time-limit", "timeout-s",
    "send", "return", "preload", "cold", "keep", "detach", "dry-run", "help",
)  # fmt: skip
#: Without a value.
SWITCHES = frozenset(
    {"module", "no-python", "virtual-local-rank", "same-model", "exclusive", "scavenge", "cold", "detach", "dry-run",
     "help"}
)  # fmt: skip
SHORT = {"-m": "module", "-t": "tee", "-r": "redirects", "-h": "help"}

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
