"""Values that the notebook sends to every node's agent at each start."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The nodes of one start by node rank: the notebook's own container first, if it takes part, then workers."""

    includes_notebook: bool
    #: Indexes of the workers in the broker's job, and the names of their nodes.
    workers: tuple[int, ...]
    nodes: tuple[str, ...]
    nproc_per_node: int
    #: Number of preemptions of the job before its grant.
    preemptions: int = 0

    @property
    def participants(self) -> tuple[int | None, ...]:
        """Return the workers' indexes by node rank; None stands for the notebook's own container."""
        return (None, *self.workers) if self.includes_notebook else self.workers

    @property
    def nnodes(self) -> int:
        return len(self.participants)

    @property
    def ranks(self) -> int:
        """Return the number of ranks on all nodes."""
        return self.nnodes * self.nproc_per_node

    def node_rank(self, worker: int | None) -> int:
        """Return the node rank of a worker's index; None stands for the notebook's own container."""
        return self.participants.index(worker)

    def node_of(self, worker: int) -> str:
        """Return the name of a worker's node."""
        return self.nodes[self.workers.index(worker)]

    def limited_to(self, nnodes: int) -> Membership:
        """Return the membership of the first `nnodes` nodes."""
        kept = max(0, nnodes - int(self.includes_notebook))
        return replace(self, workers=self.workers[:kept], nodes=self.nodes[:kept])

    def without(self, workers: frozenset[int]) -> Membership:
        """Return the membership without these workers."""
        remaining = [pair for pair in zip(self.workers, self.nodes, strict=True) if pair[0] not in workers]
        return replace(self, workers=tuple(pair[0] for pair in remaining), nodes=tuple(pair[1] for pair in remaining))


class StartMethod(StrEnum):
    """The way in which a node's ranks are started."""

    #: Forked from a process that has imported torch; a script sees the same environment as under torchrun.
    FORK = "fork"
    #: Started by torchrun itself.
    TORCHRUN = "torchrun"
    #: One program on each node, with all GPUs of its container: a task file's `run`.
    TASK = "task"


@dataclass(frozen=True, kw_only=True)
class Channel:
    """Address and keys to which an agent sends output. The keys are for one launch only."""

    url: str
    server_public: bytes
    client_public: bytes
    client_secret: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """One start of all ranks; the same value on every node."""

    run_id: str
    #: Number of the start, from 0.
    attempt: int
    membership: Membership
    master_addr: str
    master_port: int
    #: Script, module or program with its arguments.
    command: tuple[str, ...]
    module: bool
    no_python: bool
    #: Additional torchrun flags.
    torchrun_flags: tuple[str, ...]
    #: Seconds that torchrun waits for ranks after SIGTERM; None for its default.
    shutdown_s: int | None
    cwd: str
    log_dir: str
    #: Variables of the ranks, on top of those of their container.
    environ: dict[str, str]
    #: Prepended to PYTHONPATH; may be empty.
    python_path: str
    channel: Channel
    start_method: StartMethod = StartMethod.TORCHRUN
    #: Restarts after failures, counted as in TORCHELASTIC_RESTART_COUNT and TORCHELASTIC_MAX_RESTARTS.
    restart_count: int = 0
    max_restarts: int = 0
    #: A free port of `master_addr` for JAX's coordinator; 0 if none was sought.
    coordinator_port: int = 0
    #: The exchange folder for variables and results, see `worker.rank_main`; empty for none.
    exchange: str = ""
    #: The mode of `--comm`; empty to leave the script's communication as it is.
    comm: str = ""
    #: The name under which the prediction of the script is kept; empty to run it without a profile.
    predict: str = ""
    #: Send all output without skipping: the reader keeps up, because it is a file.
    unlimited_output: bool = False
    #: Ranks display plots and tables in a notebook, see `common.displays`.
    displays: bool = False
    #: The rank of `--debug`; None without it.
    debug: int | None = None


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """An agent's description of its container. `worker` is None in the notebook's own."""

    worker: int | None
    node: str
    address: str
    interface: str
    #: Free on `address` when the agent checked.
    port: int
    #: Variables for ranks here, chosen from the container and its network (`worker.nccl_env`); the user's take
    #: precedence.
    rank_environ: dict[str, str] = field(default_factory=dict)
    #: Its GPUs are simulated ones of the practice closet, on which CUDA does not run.
    is_simulated: bool = False


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """The end of a rank on its node."""

    rank: int
    node: str
    #: Negative for a signal; None if torchrun did not report it.
    exit_code: int | None
    #: The end of its stderr, or the traceback in its error file.
    error: str
    #: Time of the last write to its stderr, in ns of that node's clock; 0 if unknown.
    at_ns: int
    #: Name and UUID of its GPU, empty if unknown.
    gpu: str = ""
    #: The kernel's out-of-memory killer ended a process in its container while it ran.
    is_out_of_memory: bool = False
    #: The container's memory limit; 0 if it has none or it is unknown.
    memory_limit_mib: int = 0
