"""The options of one launch as a value."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu_launch.broker.models import GpuRequest


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
    dry_run: bool = False
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
