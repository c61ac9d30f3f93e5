"""What `run --dry-run` shows of a job: as JSON and as text."""

from __future__ import annotations

from typing import Any

from gpu_launch.cli.submission.upload import JobSubmission, load_text
from gpu_launch.output import text as render


def build_plan_json(job: JobSubmission, *, batch: bool) -> dict[str, Any]:
    """Return what `--dry-run --json` shows."""
    load = job.load
    return {
        "name": job.manifest.name,
        "folder": job.manifest.folder,
        "words": list(job.manifest.words),
        "environ": sorted(job.manifest.environ),
        "secrets": list(job.manifest.secret_names),
        "nnodes": job.nnodes,
        "min_nnodes": job.least_nnodes,
        "nproc_per_node": job.nproc_per_node,
        "batch": batch,
        "array": None if job.indexes is None else list(job.indexes),
        "max_running": job.max_running,
        "after": job.after,
        "retries": job.retries,
        "port": job.port,
        "port_users": list(job.port_users),
        "sleeps": job.sleeps,
        "demand": job.demand.build_body(),
        "files": [entry.name.as_posix() for entry in load.entries if not entry.is_folder] if load else [],
        "bytes": load.size if load else 0,
    }


def format_plan(job: JobSubmission) -> str:
    """Return what `--dry-run` shows."""
    nodes = str(job.nnodes) if job.least_nnodes is None else f"{job.least_nnodes} to {job.nnodes}"
    lines = [
        f"would send: {load_text(job.load).removeprefix('sending ') if job.load else 'nothing'}",
        f"to:         ~/{job.manifest.folder}".rstrip("/"),
        f"ask for:    {job.demand.describe(job.nproc_per_node)} on each of {nodes} node{'' if nodes == '1' else 's'}",
    ]
    if job.indexes is not None:
        lines[-1] = f"ask for:    {job.demand.describe(1)} for each of {len(job.indexes)} tasks"
        lines[-1] += "" if job.max_running is None else f", {job.max_running} at the same time"
    if job.after is not None:
        lines.append(f"start:      when {job.after} has succeeded")
    if job.retries:
        lines.append(f"try again:  after a failure, up to {render.format_times(job.retries)}")
    if job.port is not None:
        users = "".join(f" and {name}" for name in job.port_users)
        lines.append(f"port:       {job.port}, at an address of the hub for you{users}")
    if job.sleeps:
        lines.append("when idle:  it releases its GPUs, and starts again at the next request")
    if job.manifest.task is None:
        lines.append(f"and run:    %gpu_launch {' '.join(job.manifest.words)}")
    else:
        lines.append("and run:    the task's commands on every node")
    if job.manifest.environ:
        names = [
            f"{name} (secret)" if name in job.manifest.secret_names else name for name in sorted(job.manifest.environ)
        ]
        lines.append(f"with:       {', '.join(names)}")
    return "\n".join(lines)
