"""What the notebook tells every node's agent: one frozen value a start."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gpu_launch.roster import Roster


class Way(StrEnum):
    """How a node's ranks are started."""

    #: Forked from a process that has imported torch already; what a script sees is as under torchrun.
    FORK = "fork"
    #: Literal torchrun.
    TORCHRUN = "torchrun"
    #: One program a node, which sees all GPUs of its container: a task file's `run`.
    TASK = "task"


@dataclass(frozen=True, kw_only=True)
class Channel:
    """Where an agent sends output. The keys are for one launch only."""

    url: str
    server_public: bytes
    client_public: bytes
    client_secret: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """One start of all ranks, the same value on every node."""

    run_id: str
    #: 0 for the first start, counted up by restarts.
    attempt: int
    roster: Roster
    master_addr: str
    master_port: int
    #: Script, module or program with its arguments.
    command: tuple[str, ...]
    module: bool
    no_python: bool
    #: More torchrun flags.
    passed: tuple[str, ...]
    #: How long torchrun waits for ranks that were told to end, in seconds; None for its own limit.
    shutdown_s: int | None
    cwd: str
    log_dir: str
    #: Set for the ranks, over what their container has.
    environ: dict[str, str]
    #: Prepended to PYTHONPATH; empty for nothing.
    python_path: str
    channel: Channel
    way: Way = Way.TORCHRUN
    #: Counts restarts after failures as torchrun does: TORCHELASTIC_RESTART_COUNT and TORCHELASTIC_MAX_RESTARTS.
    restart_count: int = 0
    max_restarts: int = 0
    #: The folder by which variables go into the ranks and results come back, see `ranks.script`; empty for none.
    exchange: str = ""
    #: Nothing of the ranks' output is passed over on its way: whoever reads it keeps up, as a file does.
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """What an agent says of its container. `worker` is None in the notebook's own."""

    worker: int | None
    node: str
    address: str
    interface: str
    #: Free on `address` a moment ago.
    port: int
    #: What is set for ranks here, found from the container and its network (`settings`); the user's own wins.
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank ended on its node."""

    rank: int
    node: str
    #: Negative for a signal; None where torchrun did not say.
    exit_code: int | None
    #: The end of its stderr, or its error file's traceback.
    error: str
    #: When its last stderr was written, in ns of that node's clock; 0 where not known.
    at_ns: int
    #: The name and UUID of its GPU, where known.
    gpu: str = ""
    #: The kernel killed something in its container for want of memory while it ran.
    is_out_of_memory: bool = False
    #: That container's memory limit; 0 where it has none or it is not known.
    memory_limit_mib: int = 0
