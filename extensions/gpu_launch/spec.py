"""What the notebook tells every node's agent: one frozen value a start."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu_launch.roster import Roster


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


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """What an agent says of its container. `worker` is None in the notebook's own."""

    worker: int | None
    node: str
    address: str
    interface: str
    #: Free on `address` a moment ago.
    port: int


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
