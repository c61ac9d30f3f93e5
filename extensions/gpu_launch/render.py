"""Ranks' output and the launch's progress as text. Pure: time is passed in."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_launch.wire import Cluster, Job

#: Most text a second in the notebook; Jupyter itself drops output beyond 1 MB/s. All of it is in the log files.
CAP_BYTES_S = 400_000
CAP_BURST_BYTES = 1_000_000
#: A line without its end is shown after this long, a progress bar that redraws itself this often.
PARTIAL_S = 0.5
REDRAW_S = 2.0


@dataclass
class _Pending:
    """A line that has not ended yet."""

    text: str = ""
    changed_at: float = 0.0
    shown_at: float = 0.0


class Lines:
    """Turns chunks of ranks' streams into whole prefixed lines."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, str, str], _Pending] = {}

    def feed(self, rank: int, node: str, stream: str, text: str, now: float) -> list[str]:
        """The lines that `text` completes."""
        pending = self._pending.setdefault((rank, node, stream), _Pending(shown_at=now))
        *whole, rest = (pending.text + text.replace("\r\n", "\n")).split("\n")
        pending.text, pending.changed_at = collapse(rest, keep_end=True), now
        return [prefix(rank, node) + collapse(line) + "\n" for line in whole]

    def overdue(self, now: float, *, everything: bool = False) -> list[tuple[str, str]]:
        """(stream, line) of unended lines that have waited long enough; with `everything` all of them."""
        found = []
        for (rank, node, stream), pending in self._pending.items():
            redraws = "\r" in pending.text
            is_due = now - pending.shown_at >= REDRAW_S if redraws else now - pending.changed_at >= PARTIAL_S
            shown = collapse(pending.text)
            if shown and (is_due or everything):
                found.append((stream, prefix(rank, node) + shown + "\n"))
                pending.text, pending.shown_at = "", now
        return found


def collapse(line: str, *, keep_end: bool = False) -> str:
    """What a terminal shows of a line that redraws itself with carriage returns.

    With `keep_end` the last return stays, as what follows may still redraw.
    """
    if "\r" not in line:
        return line
    drawn = [part for part in line.split("\r") if part]
    last = drawn[-1] if drawn else ""
    return f"\r{last}" if keep_end else last


def prefix(rank: int, node: str) -> str:
    """Who says a line."""
    return f"[rank {rank} · {node}] "


class Cap:
    """Lets CAP_BYTES_S through and counts the rest."""

    def __init__(self, *, rate: float = CAP_BYTES_S, burst: float = CAP_BURST_BYTES, now: float = 0.0) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, now
        self._skipped = 0

    def take(self, size: int, now: float) -> bool:
        """Whether `size` bytes may be shown now."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < size:
            self._skipped += 1
            return False
        self._left -= size
        return True

    def skipped(self) -> int:
        """Lines not shown since last asked."""
        count, self._skipped = self._skipped, 0
        return count


def count(number: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def nodes_text(job: Job | None, own: str) -> str:
    """`rig1 RTX 5090, rig2 RTX 5070`: who takes part. `own` is the notebook's own part, empty for none."""
    parts = [own] if own else []
    for worker in job.workers if job else ():
        models = sorted({gpu.model for gpu in worker.gpus})
        number = f"{len(worker.gpus)} × " if len(worker.gpus) > 1 else ""
        parts.append(f"{worker.node} {number}{', '.join(models)}".strip())
    return ", ".join(parts)


def job_text(job: Job, *, gpus: int, workers: int) -> str:
    """What is being waited for while workers are asked for and start."""
    if job.state == "waiting":
        place = f": position {job.position}" if job.position else ""
        why = f" ({job.waiting_for})" if job.waiting_for else ""
        return f"waiting for {count(gpus, 'GPU')} on {count(workers, 'node')}{place}{why}"
    return f"starting {count(workers, 'worker')} on {nodes_text(job, '')}"


def model_of(cluster: Cluster | None, uuids: tuple[str, ...]) -> str | None:
    """The model of this container's own GPUs, as the cluster calls it; None where not known."""
    gpu = cluster.gpu(uuids[0]) if cluster and uuids else None
    return gpu.model if gpu else None
