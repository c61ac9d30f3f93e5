"""Jobs and the cluster as rows for people and as JSON for scripts. Pure."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gpu_launch.quantities import format_memory
from gpu_launch.wire import ENDED, WAITING, Cluster, Gpu, Job, Node

#: What the broker says of a job that was ended by whoever asked for it.
_STOPPED = "stopped"


def state_of(job: Job) -> str:
    """The broker's word for a job that has not ended; `done`, `failed`, `cancelled` or `ended` for one that has."""
    if job.state != ENDED:
        return job.state
    if job.exit_code is not None:
        return "failed" if job.exit_code else "done"
    return "cancelled" if (job.reason or "").startswith(_STOPPED) else "ended"


def gpus_of(job: Job) -> int:
    """GPUs it has, or asks for."""
    has = sum(len(worker.gpus) for worker in job.workers)
    return has or job.gpus or job.nnodes * job.nproc_per_node


def nodes_of(job: Job) -> tuple[str, ...]:
    """The nodes it is on, or was on, by rank."""
    return tuple(dict.fromkeys(worker.node for worker in job.workers))


def job_json(job: Job) -> dict[str, Any]:
    """The keys stay as they are from version to version; later ones may add some. Times are ISO 8601."""
    return {
        "run_id": job.run_id,
        "id": job.id,
        "name": job.name,
        "state": state_of(job),
        "detached": job.detached,
        "gpus": gpus_of(job),
        "nodes": list(nodes_of(job)),
        "position": job.position,
        "expected_start": _iso(job.expected_start),
        "waiting_for": job.waiting_for,
        "created_at": _iso(job.created_at),
        "started_at": _iso(job.started_at),
        "ended_at": _iso(job.ended_at),
        "exit_code": job.exit_code,
        "reason": job.reason,
        "preemptions": job.preemptions,
    }


def _iso(at: datetime | None) -> str | None:
    return at.isoformat() if at is not None else None


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table."""

    title: str
    #: It may be cut to so many characters where the table is too wide; None for never.
    least: int | None = None
    is_number: bool = False


JOB_COLUMNS = (
    Column(title="RUN"),
    Column(title="NAME", least=8),
    Column(title="STATE"),
    Column(title="GPUS", is_number=True),
    Column(title="NODES", least=6),
    Column(title="TIME", least=9),
    Column(title="EXIT", is_number=True),
)


def job_row(job: Job, now: datetime) -> tuple[str, ...]:
    """A job for people; what waits tells its place, what runs for how long."""
    return (
        job.run_id,
        job.name if job.detached else (job.name or "(notebook)"),
        state_of(job),
        str(gpus_of(job)),
        ",".join(nodes_of(job)) or "-",
        _time_text(job, now),
        "" if job.exit_code is None else str(job.exit_code),
    )


def _time_text(job: Job, now: datetime) -> str:
    if job.state == WAITING:
        since = _span(now, job.created_at)
        return (
            " ".join([*([f"#{job.position}"] if job.position else []), *([f"since {since}"] if since else [])]) or "-"
        )
    return _span(job.ended_at or now, job.started_at) or "-"


def _span(end: datetime, start: datetime | None) -> str:
    """`0:42`, `1:02:03`, `3d 04h`."""
    if start is None:
        return ""
    seconds = max(0, int((end - start).total_seconds()))
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02}h"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


NODE_COLUMNS = (
    Column(title="NODE"),
    Column(title="STATE"),
    Column(title="GPUS", least=12),
    Column(title="FREE", is_number=True),
    Column(title="HELD BY", least=8),
)


def node_row(node: Node) -> tuple[str, ...]:
    """A node for people."""
    holders = dict.fromkeys(gpu.holder for gpu in node.gpus if gpu.holder)
    others = dict.fromkeys(gpu.state for gpu in node.gpus if gpu.state not in ("", "free", "held"))
    return (
        node.name,
        node.state or "-",
        _cards(node.gpus) or "-",
        str(sum(is_free(gpu) for gpu in node.gpus)),
        ", ".join([*holders, *(f"({state})" for state in others)]) or "-",
    )


def is_free(gpu: Gpu) -> bool:
    """Whether it can be given now."""
    return gpu.state == "free" if gpu.state else not gpu.holder


def _cards(gpus: Sequence[Gpu]) -> str:
    """`2 × RTX 5090 (31.8 GiB)`."""
    numbers = Counter((gpu.model, gpu.memory_mib) for gpu in gpus)
    return ", ".join(
        f"{number} × {model}" + (f" ({format_memory(memory)})" if memory else "")
        for (model, memory), number in numbers.items()
    )


def cluster_json(cluster: Cluster) -> dict[str, Any]:
    """As `job_json`, for the nodes."""
    return {
        "nodes": [
            {
                "name": node.name,
                "state": node.state,
                "message": node.message,
                "free": sum(is_free(gpu) for gpu in node.gpus),
                "gpus": [
                    {
                        "uuid": gpu.uuid,
                        "model": gpu.model,
                        "memory_mib": gpu.memory_mib,
                        "state": gpu.state,
                        "holder": gpu.holder or None,
                    }
                    for gpu in node.gpus
                ],
            }
            for node in cluster.nodes
        ],
        "waiting": cluster.waiting,
    }


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int) -> str:
    """Lines of `width` characters at most, where the columns that may be cut allow it."""
    cells = [[column.title for column in columns], *(list(map(_plain, row)) for row in rows)]
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
    over = sum(widths) + 2 * (len(columns) - 1) - width
    while over > 0:
        able = [place for place, column in enumerate(columns) if column.least and widths[place] > column.least]
        if not able:
            break
        widest = max(able, key=lambda place: widths[place])
        widths[widest] -= 1
        over -= 1
    lines = []
    for row in cells:
        parts = [_fit(cell, widths[place], right=columns[place].is_number) for place, cell in enumerate(row)]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def _fit(text: str, width: int, *, right: bool) -> str:
    while _width(text) > width:
        text = text[:-2] + "…" if text.endswith("…") else text[:-1] + "…"
    gap = " " * (width - _width(text))
    return gap + text if right else text + gap


def _plain(text: str) -> str:
    """Without what would move the cursor: names and messages are others' words."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _width(text: str) -> int:
    """Columns of a terminal."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )
