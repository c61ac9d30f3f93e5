"""`%gpu_status` and `%gpu_release`: this notebook's workers, the jobs, and the last runs."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpu_launch.broker import models
from gpu_launch.broker.client import build_broker
from gpu_launch.broker.own_jobs import list_own_jobs
from gpu_launch.common import run_folder
from gpu_launch.common.job_manifest import JobStatus
from gpu_launch.common.run_folder import RunFolder
from gpu_launch.environment import Environment
from gpu_launch.errors import BrokerError
from gpu_launch.launch.workers.worker_pool import WorkerPoolView, worker_pools
from gpu_launch.output import logs
from gpu_launch.output import text as render
from gpu_launch.output.screens import is_in_notebook
from gpu_launch.units import format_span

_RUNS = 5


@dataclass(frozen=True, kw_only=True)
class Table:
    """One list for a person."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    #: Shown where there are no rows.
    nothing: str


def show(env: Environment) -> None:
    """Show everything: as tables in a notebook, as text elsewhere."""
    tables = collect_tables(env)
    text = format_text(tables)
    if not is_in_notebook():
        sys.stdout.write(text)
        return
    from IPython.display import display

    display({"text/plain": text, "text/html": format_html(tables)}, raw=True)


def collect_tables(env: Environment) -> list[Table]:
    """Return the tables of the current state."""
    broker, problem = build_broker(env), "This server has no broker."
    jobs: list[models.Job] = []
    idle: list[models.Gpu] = []
    now = datetime.now(UTC)
    if broker is not None:
        try:
            jobs, problem = list_own_jobs(broker, env), "None."
            idle = [gpu for node in broker.get_cluster().nodes for gpu in node.gpus if gpu.idle_since is not None]
        except BrokerError as error:
            problem = str(error)
    latest = [(run, logs.read_status(run)) for run in logs.list_runs(env.home, most=_RUNS)]
    return [
        build_pool_table(worker_pools.list_views()),
        build_jobs_table(jobs, now=now, nothing=problem),
        *([build_idle_table(idle, now=now)] if idle else []),
        build_runs_table(latest, home=env.home),
    ]


def build_idle_table(gpus: Iterable[models.Gpu], *, now: datetime) -> Table:
    """Return the table of GPUs whose holders do not use them although others wait."""
    rows = tuple(
        (gpu.model, gpu.node, gpu.holder, format_span((now - gpu.idle_since).total_seconds()))
        for gpu in gpus
        if gpu.idle_since is not None
    )
    header = ("GPU", "node", "held by", "not used for")
    return Table(title="Held and not used, while others wait", header=header, rows=rows, nothing="None.")


def build_pool_table(views: Sequence[WorkerPoolView]) -> Table:
    """Return the table of the workers that stay with this notebook."""
    rows = tuple((view.run_id, view.nodes, _left(view), ", ".join(view.jobs)) for view in views)
    header = ("workers", "nodes", "time left", "jobs")
    return Table(title="Workers of this notebook", header=header, rows=rows, nothing="None.")


def build_jobs_table(jobs: Iterable[models.Job], *, now: datetime, nothing: str) -> Table:
    """Return the table of the user's jobs."""
    rows = tuple(
        (job.run_id, job.name or ("detached" if job.detached else "launch"), _wants(job), _job_state(job, now))
        for job in jobs
    )
    return Table(title="Your jobs", header=("run", "what", "GPUs", "state"), rows=rows, nothing=nothing)


def build_runs_table(latest: Iterable[tuple[RunFolder, JobStatus | None]], *, home: Path) -> Table:
    """Return the table of runs with their output."""
    rows = []
    for run, state in latest:
        began = logs.parse_start_time(run)
        rows.append(
            (
                run.run_id,
                f"{began:%d %b %H:%M}" if began else "",
                _end(run, state),
                run_folder.shorten_path(run.logs, home),
            )
        )
    return Table(title="Last runs", header=("run", "asked for", "end", "logs"), rows=tuple(rows), nothing="None yet.")


def _end(run: RunFolder, state: JobStatus | None) -> str:
    if state is None:
        return "running" if run.heartbeat.exists() else "ended"
    text = _last_line(state.error) or state.text
    return f"{state.state}: {text}" if text and state.state != "done" else state.state


def _left(view: WorkerPoolView) -> str:
    return "in use" if view.remaining_s is None else f"stay {format_span(view.remaining_s)} more"


def _wants(job: models.Job) -> str:
    if job.workers:
        return render.format_nodes(job.workers, "")
    if job.gpus is not None:
        return render.format_count(job.gpus, "GPU")
    return f"{render.format_count(job.nnodes, 'node')} × {render.format_count(job.nproc_per_node, 'GPU')}"


def _job_state(job: models.Job, now: datetime) -> str:
    if job.state != models.WAITING:
        since = job.started_at or job.created_at
        return job.state + (f" for {format_span((now - since).total_seconds())}" if since is not None else "")
    return f"{job.state}{render.format_queue_state(job, now)}"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:120] if lines else ""


def format_text(tables: Iterable[Table]) -> str:
    """Return the tables as text, in columns."""
    parts = []
    for table in tables:
        lines = [table.title]
        if table.rows:
            cells = [table.header, *table.rows]
            wide = [max(len(row[column]) for row in cells) for column in range(len(table.header))]
            rows = ["  ".join(text.ljust(width) for text, width in zip(row, wide, strict=True)) for row in cells]
            lines += [f"  {row.rstrip()}" for row in rows]
        else:
            lines.append(f"  {table.nothing}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def format_html(tables: Iterable[Table]) -> str:
    """Return the tables as HTML."""
    return "".join(_table_html(table) for table in tables)


def _table_html(table: Table) -> str:
    title = f"<p><b>{html.escape(table.title)}</b></p>"
    if not table.rows:
        return f"{title}<p>{html.escape(table.nothing)}</p>"
    head = "".join(f"<th>{html.escape(text)}</th>" for text in table.header)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{html.escape(text)}</td>' for text in row) + "</tr>"
        for row in table.rows
    )
    return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def release_pools(run: str) -> str:
    """Free idle workers, all or those of one run; return what was freed.

    Raises:
        UsageError: for busy or unknown ones.
    """
    if not run:
        freed = worker_pools.free_idle()
    else:
        names = [view.run_id for view in worker_pools.list_views()]
        near = [name for name in names if name == run] or [name for name in names if name.endswith(run)]
        freed = worker_pools.free_idle(near[0] if len(near) == 1 else run)
    return "".join(f"freed: {nodes}\n" for nodes in freed) or "This notebook has no idle workers.\n"
