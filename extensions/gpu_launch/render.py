"""A launch's progress as text: who takes part, what is waited for, who says a line. Pure: time is passed in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime

from gpu_launch.plan import Plan
from gpu_launch.wire import PREEMPTING, WAITING, Gpu, Job, Worker


def prefix(rank: int, node: str) -> str:
    """Who says a line."""
    return f"[rank {rank} · {node}] "


def ranks_prefix(ranks: Sequence[int]) -> str:
    """Who says a line that several ranks say."""
    return f"[ranks {numbers_text(ranks)} ×{len(ranks)}] "


def numbers_text(numbers: Iterable[int]) -> str:
    """`0-3, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def ranks_text(ranks: Collection[int]) -> str:
    """`rank 2`, `ranks 0-3, 5`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers_text(ranks)}"


def size_text(size: float) -> str:
    """`12 kB`, `3.4 MB`: bytes, for a person."""
    units = ["GB", "MB", "kB", "bytes"]
    while size >= 1000 and len(units) > 1:
        units.pop()
        size /= 1000
    return f"{size:.0f} {units[-1]}" if units[-1] == "bytes" or size >= 10 else f"{size:.1f} {units[-1]}"


def span_text(seconds: float) -> str:
    """`7 s`, `2 min 5 s`, `3 h 12 min`, `2 d 4 h`."""
    whole = max(0, round(seconds))
    for unit, of, smaller, each in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= of:
            rest = whole % of // each
            return f"{whole // of} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


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
        return f"waiting for {asked_text(plan)}{place_text(job, now)}"
    if job.is_granted:
        return f"starting {count(len(job.workers), 'worker')} on {nodes_text(job.workers, '')}"
    return "preempted, the workers end" if job.state == PREEMPTING else f"the broker says: {job.state}"


def asked_text(plan: Plan) -> str:
    """`2 GPUs on 2 nodes`, `2 to 4 GPUs on 1 to 2 nodes`."""
    least, most, each = max(1, plan.least_workers), plan.workers, plan.nproc_per_node
    return f"{_range(least * each, most * each, 'GPU')} on {_range(least, most, 'node')}"


def _range(least: int, most: int, noun: str) -> str:
    return count(most, noun) if least == most else f"{least} to {count(most, noun)}"


def place_text(job: Job, now: datetime) -> str:
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
