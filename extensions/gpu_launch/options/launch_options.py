"""The options of a launch as one value, and which of its fields go where."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.options.value_types import ArrayTasks

DEMAND_FIELDS = frozenset(item.name for item in fields(GpuRequest))
#: Options of a job that runs without the notebook.
JOB_FIELDS = ("array", "after", "retries", "guests")
#: Options about asking for GPUs and about the notebook: a detached job's driver does not need them.
NOT_IN_MANIFEST = (
    DEMAND_FIELDS | {"timeout_s", "send", "returns", "keep_s", "detach", "dry_run", "help"} | frozenset(JOB_FIELDS)
)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The options of one launch, checked; `command` builds it for every place where options are typed."""

    #: The most nodes; `least_nnodes` is None where exactly this number is needed.
    nnodes: int = 1
    least_nnodes: int | None = None
    nproc_per_node: int = 1
    max_restarts: int = 0
    tee: str = "0"
    redirects: str = "0"
    #: Local ranks whose output is shown; empty for all.
    shown_ranks: tuple[int, ...] = ()
    log_dir: str | None = None
    #: The ranks' stacks are shown when no rank has made progress for this many seconds; 0 for never.
    stacks_after_s: int = 300
    #: The rank on which the debugger opens at `breakpoint()` and where it fails; None for each that calls it.
    debug: int | None = None
    module: bool = False
    no_python: bool = False
    #: GPU models in it are spelled as the user typed them.
    demand: GpuRequest = field(default_factory=GpuRequest)
    timeout_s: float | None = None
    #: Names of the notebook's variables that the ranks get, and of the ranks' variables that come back.
    send: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    #: Modules that are imported, with torch, before ranks are forked.
    preload: tuple[str, ...] = ()
    #: torchrun starts every rank; nothing is forked.
    cold: bool = False
    #: How long the workers stay afterwards, seconds; None for the administrator's setting.
    keep_s: int | None = None
    #: It runs without the notebook.
    detach: bool = False
    #: Tasks of an array, the run that must succeed before, and the number of further tries; for detached jobs only.
    array: ArrayTasks | None = None
    after: str | None = None
    retries: int = 0
    dry_run: bool = False
    #: Profile the script on one card, and predict its speed on several.
    predict: bool = False
    #: How gradients are exchanged, a `CommMode` or `AUTO`; empty to leave the script as it is.
    comm: str = ""
    #: More torchrun flags, such as `--role=trainer`.
    torchrun_flags: tuple[str, ...] = ()
    #: Script, module or program; empty for a cell.
    script: str = ""
    arguments: tuple[str, ...] = ()
    help: bool = False

    def shows(self, local_rank: int, stream: str) -> bool:
        """Return whether a rank's `stdout` or `stderr` is shown, by the rules of torchrun's console."""
        bit = 1 if stream == "stdout" else 2
        if self.shown_ranks and local_rank not in self.shown_ranks:
            return False
        return not _stream_bits(self.redirects, local_rank) & bit or bool(_stream_bits(self.tee, local_rank) & bit)


def _stream_bits(text: str, local_rank: int) -> int:
    """Return the bits that torchrun's notation gives a local rank: `3`, or `0:3,1:1` (0 for ranks not named)."""
    if ":" not in text:
        return int(text)
    pairs = (part.split(":") for part in text.split(","))
    return next((int(bits) for rank, bits in pairs if int(rank) == local_rank), 0)
