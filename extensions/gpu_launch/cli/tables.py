"""Tables and JSON of jobs and of the cluster."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gpu_launch.broker.models import ENDED, RUNNING, WAITING, Cluster, Gpu, Job, Node
from gpu_launch.units import format_memory

#: The broker's reason for a job that was ended by a user.
_STOPPED = "stopped"


def derive_state(job: Job) -> str:
    """Return the broker's state of a job; `suspended` for one whose GPU others have meanwhile.

    After its end it is `done`, `failed`, `cancelled` or `ended`.
    """
    if job.state == RUNNING and job.suspension:
        return "suspended"
    if job.state != ENDED:
        return job.state
    if job.exit_code is not None:
        return "failed" if job.exit_code else "done"
    return "cancelled" if (job.reason or "").startswith(_STOPPED) else "ended"


def count_gpus(job: Job) -> int:
    """Return the number of GPUs that the job has, or requests."""
    held = sum(len(worker.gpus) for worker in job.workers)
    return held or job.gpus or job.nnodes * job.nproc_per_node


def list_nodes(job: Job) -> tuple[str, ...]:
    """Return the job's nodes by rank, also after its end."""
    return tuple(dict.fromkeys(worker.node for worker in job.workers))


def _find_unreachable(job: Job) -> set[str]:
    return {worker.node for worker in job.workers if not worker.is_reachable}


def _describe_nodes(job: Job) -> list[str]:
    unreachable = _find_unreachable(job)
    return [f"{node} (unreachable)" if node in unreachable else node for node in list_nodes(job)]


def build_job_json(job: Job) -> dict[str, Any]:
    """Build the JSON of a job. Later versions may add keys but do not change them. Times are ISO 8601."""
    return {
        "run_id": job.run_id,
        "id": job.id,
        "name": job.name,
        "array": job.array,
        "state": derive_state(job),
        "detached": job.detached,
        "gpus": count_gpus(job),
        "nodes": list(list_nodes(job)),
        "unreachable_nodes": [node for node in list_nodes(job) if node in _find_unreachable(job)],
        "position": job.position,
        "expected_start": format_iso(job.expected_start),
        "waiting_for": job.waiting_for,
        "created_at": format_iso(job.created_at),
        "started_at": format_iso(job.started_at),
        "ended_at": format_iso(job.ended_at),
        "exit_code": job.exit_code,
        "reason": job.reason,
        "preemptions": job.preemptions,
        "after": job.after,
        "retries": job.retries,
        "max_retries": job.max_retries,
        "sleeps": job.sleeps,
        "port": job.port,
        "port_users": list(job.port_users),
        "costs": job.costs,
    }


def format_iso(moment: datetime | None) -> str | None:
    """Format a time for JSON; None if it is unknown."""
    return moment.isoformat() if moment is not None else None


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table."""

    title: str
    #: A wide table may cut the column to this many characters; None to keep its width.
    min_width: int | None = None
    is_number: bool = False


JOB_COLUMNS = (
    Column(title="RUN"),
    Column(title="NAME", min_width=8),
    Column(title="STATE"),
    Column(title="GPUS", is_number=True),
    Column(title="NODES", min_width=6),
    Column(title="TIME", min_width=9),
    Column(title="EXIT", is_number=True),
)


def build_job_row(job: Job, now: datetime) -> tuple[str, ...]:
    """Build a job's row; the time is that of waiting or of running."""
    return (
        job.run_id,
        job.name if job.detached else (job.name or "(notebook)"),
        derive_state(job),
        str(count_gpus(job)),
        ",".join(_describe_nodes(job)) or "-",
        _format_time(job, now),
        "" if job.exit_code is None else str(job.exit_code),
    )


def format_task_counts(tasks: Sequence[Job]) -> str:
    """Format as `16 tasks of run-…: 4 running, 10 waiting, 2 done; 4 at the same time`."""
    counts = Counter(derive_state(task) for task in tasks)
    states = ", ".join(f"{number} {state}" for state, number in counts.most_common())
    limit = tasks[0].array_limit
    count = "1 task" if len(tasks) == 1 else f"{len(tasks)} tasks"
    return f"{count} of {tasks[0].array}: {states}" + ("" if limit is None else f"; {limit} at the same time")


def _format_time(job: Job, now: datetime) -> str:
    if job.state == WAITING:
        since = _format_duration(now, job.created_at)
        return (
            " ".join([*([f"#{job.position}"] if job.position else []), *([f"since {since}"] if since else [])]) or "-"
        )
    return _format_duration(job.ended_at or now, job.started_at) or "-"


def _format_duration(end: datetime, start: datetime | None) -> str:
    """Format as `0:42`, `1:02:03`, `3d 04h`."""
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
    Column(title="GPUS", min_width=12),
    Column(title="FREE", is_number=True),
    Column(title="HELD BY", min_width=8),
)


def build_node_row(node: Node) -> tuple[str, ...]:
    """Build a node's row."""
    holders = dict.fromkeys(gpu.holder + (" (idle)" if gpu.idle_since else "") for gpu in node.gpus if gpu.holder)
    others = dict.fromkeys(gpu.state for gpu in node.gpus if gpu.state not in ("", "free", "held"))
    return (
        node.name,
        node.state or "-",
        _format_gpus(node.gpus) or "-",
        str(sum(is_free(gpu) for gpu in node.gpus)),
        ", ".join([*holders, *(f"({state})" for state in others)]) or "-",
    )


def is_free(gpu: Gpu) -> bool:
    """Return whether the GPU can be granted now."""
    return gpu.state == "free" if gpu.state else not gpu.holder


def _format_gpus(gpus: Sequence[Gpu]) -> str:
    """Format as `2 × RTX 5090 (31.8 GiB)`."""
    numbers = Counter((gpu.model, gpu.memory_mib) for gpu in gpus)
    return ", ".join(
        f"{number} × {model}" + (f" ({format_memory(memory)})" if memory else "")
        for (model, memory), number in numbers.items()
    )


def build_cluster_json(cluster: Cluster) -> dict[str, Any]:
    """Build the JSON of the nodes, with the same guarantee as `build_job_json`."""
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
                        "idle_since": format_iso(gpu.idle_since),
                    }
                    for gpu in node.gpus
                ],
            }
            for node in cluster.nodes
        ],
        "waiting": cluster.waiting,
    }


def format_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int) -> str:
    """Format a table with at most `width` characters in a line, as far as its columns can be cut."""
    cells = [[column.title for column in columns], *(list(map(_replace_controls, row)) for row in rows)]
    widths = [max(map(_count_columns, column)) for column in zip(*cells, strict=True)]
    over = sum(widths) + 2 * (len(columns) - 1) - width
    while over > 0:
        cuttable = [
            index for index, column in enumerate(columns) if column.min_width and widths[index] > column.min_width
        ]
        if not cuttable:
            break
        widest = max(cuttable, key=lambda index: widths[index])
        widths[widest] -= 1
        over -= 1
    lines = []
    for row in cells:
        parts = [_fit(cell, widths[index], right=columns[index].is_number) for index, cell in enumerate(row)]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def _fit(text: str, width: int, *, right: bool) -> str:
    while _count_columns(text) > width:
        text = text[:-2] + "…" if text.endswith("…") else text[:-1] + "…"
    gap = " " * (width - _count_columns(text))
    return gap + text if right else text + gap


def _replace_controls(text: str) -> str:
    """Replace control characters: names and messages come from other users."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _count_columns(text: str) -> int:
    """Return the number of terminal columns of a text."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )
