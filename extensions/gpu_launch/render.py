"""Ranks' output and the launch's progress as text. Pure: time is passed in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from gpu_launch.plan import Plan
from gpu_launch.wire import PREEMPTING, WAITING, Gpu, Job, Worker

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


def nodes_text(workers: Iterable[Worker], own: str) -> str:
    """`rig1 RTX 5090, rig2 RTX 5070`: who takes part. `own` is the notebook's own part, empty for none."""
    parts = [own] if own else []
    return ", ".join([*parts, *(f"{worker.node} {cards_text(worker.gpus)}".strip() for worker in workers)])


def cards_text(cards: Sequence[Gpu]) -> str:
    """`RTX 5070`, `2 × RTX 5090`."""
    number = f"{len(cards)} × " if len(cards) > 1 else ""
    return number + ", ".join(sorted({card.model for card in cards}))


def job_text(job: Job, plan: Plan, now: datetime) -> str:
    """What is being waited for while workers are asked for and start."""
    if job.state == WAITING:
        return f"waiting for {asked_text(plan)}{_place_text(job, now)}"
    if job.is_granted:
        return f"starting {count(len(job.workers), 'worker')} on {nodes_text(job.workers, '')}"
    return "preempted, the workers end" if job.state == PREEMPTING else f"the broker says: {job.state}"


def asked_text(plan: Plan) -> str:
    """`2 GPUs on 2 nodes`, `2 to 4 GPUs on 1 to 2 nodes`."""
    least, most, each = max(1, plan.least_workers), plan.workers, plan.nproc_per_node
    return f"{_range(least * each, most * each, 'GPU')} on {_range(least, most, 'node')}"


def _range(least: int, most: int, noun: str) -> str:
    return count(most, noun) if least == most else f"{least} to {count(most, noun)}"


def _place_text(job: Job, now: datetime) -> str:
    """Position, expected start and reason, as far as they are told."""
    parts = [f"position {job.position}"] if job.position else []
    if job.expected_start is not None:
        parts.append(f"expected to start {_soon((job.expected_start - now).total_seconds())}")
    text = ", ".join(parts)
    if job.waiting_for:
        text += f"{'; ' if text else ''}waits for {job.waiting_for.removeprefix('waits for ')}"
    return f": {text}" if text else ""


def _soon(seconds: float) -> str:
    """Coarser the longer it is, so that the line does not change all the time."""
    if seconds < 60:
        return "within a minute"
    minutes = math.ceil(seconds / 60)
    if minutes > 10:
        minutes = math.ceil(minutes / 5) * 5
    if minutes < 120:
        return f"in about {minutes} min"
    return f"in about {count(round(minutes / 60), 'hour')}"


def note_text(job: Job | None, workers: Sequence[Worker], own_cards: Sequence[Gpu]) -> str | None:
    """What is to be said of a grant, in one line: the broker's note, and that cards differ, the own ones counted in."""
    note = job.note if job else None
    cards = [*own_cards, *(card for worker in workers for card in worker.gpus)]
    if not own_cards or len({card.model for card in cards}) < 2:
        return note
    numbers = Counter(card.model for card in sorted(cards, key=lambda card: (-card.memory_mib, card.model)))
    mixed = ", ".join(f"{number} × {model}" for model, number in numbers.items())
    other = f"{note}; " if note and not note.startswith("mixed cards") else ""
    return f"{other}mixed cards: {mixed}; the slowest sets the pace"


def times(number: int) -> str:
    """`once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
