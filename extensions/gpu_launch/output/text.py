"""Texts about ranks, nodes and waiting jobs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime

from gpu_launch.broker.models import Gpu, Job, Lease, Worker


def format_rank_prefix(rank: int, node: str) -> str:
    """Return the prefix of a rank's line."""
    return f"[rank {rank} · {node}] "


def format_ranks_prefix(ranks: Sequence[int]) -> str:
    """Return the prefix of a line that several ranks wrote."""
    return f"[ranks {format_numbers(ranks)} ×{len(ranks)}] "


def format_numbers(numbers: Iterable[int]) -> str:
    """Format as `0-3, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def format_ranks(ranks: Collection[int]) -> str:
    """Format as `rank 2`, `ranks 0-3, 5`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_numbers(ranks)}"


def format_size(size: float) -> str:
    """Format bytes as `12 kB`, `3.4 MB`."""
    units = ["GB", "MB", "kB", "bytes"]
    while size >= 1000 and len(units) > 1:
        units.pop()
        size /= 1000
    return f"{size:.0f} {units[-1]}" if units[-1] == "bytes" or size >= 10 else f"{size:.1f} {units[-1]}"


def format_exact_span(seconds: float) -> str:
    """Format as `7 s`, `2 min 5 s`, `3 h 12 min`, `2 d 4 h`."""
    remaining = max(0, round(seconds))
    for unit, of, smaller, each in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if remaining >= of:
            rest = remaining % of // each
            return f"{remaining // of} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{remaining} s"


def format_count(number: int, noun: str) -> str:
    """Format as `1 GPU`, `2 GPUs`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def format_nodes(workers: Iterable[Worker], own: str) -> str:
    """Format as `rig1 RTX 5090, rig2 RTX 5070`. `own` describes the notebook's own part, empty for none."""
    parts = [own] if own else []
    return ", ".join([*parts, *(f"{worker.node} {format_gpus(worker.gpus)}".strip() for worker in workers)])


def format_gpus(gpus: Sequence[Gpu]) -> str:
    """Format as `RTX 5070`, `2 × RTX 5090`."""
    number = f"{len(gpus)} × " if len(gpus) > 1 else ""
    return number + ", ".join(sorted({gpu.model for gpu in gpus}))


def format_queue_state(job: Job | Lease, now: datetime) -> str:
    """Return position, expected start and reason, as far as known."""
    parts = [f"position {job.position}"] if job.position else []
    if job.expected_start is not None:
        parts.append(f"expected to start {_format_expected_wait((job.expected_start - now).total_seconds())}")
    text = ", ".join(parts)
    if job.waiting_for:
        text += f"{'; ' if text else ''}waits for {job.waiting_for.removeprefix('waits for ')}"
    return f": {text}" if text else ""


def _format_expected_wait(seconds: float) -> str:
    """Round more the longer the wait is, so that the line does not change all the time."""
    if seconds < 60:
        return "within a minute"
    minutes = math.ceil(seconds / 60)
    if minutes > 10:
        minutes = math.ceil(minutes / 5) * 5
    if minutes < 120:
        return f"in about {minutes} min"
    return f"in about {format_count(round(minutes / 60), 'hour')}"


def format_grant_note(job: Job | None, workers: Sequence[Worker], own_cards: Sequence[Gpu]) -> str | None:
    """Return the broker's note on a grant, with a warning about mixed GPUs, the notebook's own included."""
    note = job.note if job else None
    gpus = [*own_cards, *(gpu for worker in workers for gpu in worker.gpus)]
    if not own_cards or len({gpu.model for gpu in gpus}) < 2:
        return note
    numbers = Counter(gpu.model for gpu in sorted(gpus, key=lambda gpu: (-gpu.memory_mib, gpu.model)))
    mixed = ", ".join(f"{number} × {model}" for model, number in numbers.items())
    other = f"{note}; " if note and not note.startswith("mixed cards") else ""
    return f"{other}mixed cards: {mixed}; the slowest sets the pace"


def format_times(number: int) -> str:
    """Format as `once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
