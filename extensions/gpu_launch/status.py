"""`%gpu_status` and `%gpu_release`: what stands, waits, runs and ran."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpu_launch import history, render, runs, wire
from gpu_launch.crew import CrewView, crews
from gpu_launch.display import in_notebook
from gpu_launch.environment import Environment
from gpu_launch.errors import BrokerError
from gpu_launch.jobs import broker_of, own_jobs
from gpu_launch.order import State
from gpu_launch.quantities import format_span
from gpu_launch.runs import RunFolder

_RUNS = 5


@dataclass(frozen=True, kw_only=True)
class Table:
    """One list, for a person."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    #: Instead of no rows.
    nothing: str


def show(env: Environment) -> None:
    """Show everything: as tables in a notebook, as text elsewhere."""
    tables = look(env)
    text = as_text(tables)
    if not in_notebook():
        sys.stdout.write(text)
        return
    from IPython.display import display

    display({"text/plain": text, "text/html": as_html(tables)}, raw=True)


def look(env: Environment) -> list[Table]:
    """What there is now."""
    broker, problem = broker_of(env), "This server has no broker."
    jobs: list[wire.Job] = []
    if broker is not None:
        try:
            jobs, problem = own_jobs(broker, env), "None."
        except BrokerError as error:
            problem = str(error)
    latest = [(run, history.state(run)) for run in history.latest(env.home, most=_RUNS)]
    return [
        standing_table(crews.standing()),
        jobs_table(jobs, now=datetime.now(UTC), nothing=problem),
        runs_table(latest, home=env.home),
    ]


def standing_table(views: Sequence[CrewView]) -> Table:
    """Workers that stay with this notebook. Pure."""
    rows = tuple((view.run_id, view.nodes, _left(view), ", ".join(view.jobs)) for view in views)
    header = ("workers", "nodes", "how long", "jobs")
    return Table(title="Workers of this notebook", header=header, rows=rows, nothing="None stand.")


def jobs_table(jobs: Iterable[wire.Job], *, now: datetime, nothing: str) -> Table:
    """What the broker has for this person. Pure."""
    rows = tuple(
        (job.run_id, job.name or ("detached" if job.detached else "launch"), _wants(job), _job_state(job, now))
        for job in jobs
    )
    return Table(title="Your jobs", header=("run", "what", "GPUs", "state"), rows=rows, nothing=nothing)


def runs_table(latest: Iterable[tuple[RunFolder, State | None]], *, home: Path) -> Table:
    """Runs with their output."""
    rows = []
    for run, state in latest:
        began = history.began(run)
        rows.append((run.run_id, f"{began:%d %b %H:%M}" if began else "", _end(run, state), runs.shown(run.logs, home)))
    return Table(title="Last runs", header=("run", "asked for", "end", "logs"), rows=tuple(rows), nothing="None yet.")


def _end(run: RunFolder, state: State | None) -> str:
    if state is None:
        return "running" if run.lived.exists() else "ended"
    said = _last_line(state.error) or state.text
    return f"{state.state}: {said}" if said and state.state != "done" else state.state


def _left(view: CrewView) -> str:
    return "at work" if view.left_s is None else f"stay {format_span(view.left_s)} more"


def _wants(job: wire.Job) -> str:
    if job.workers:
        return render.nodes_text(job.workers, "")
    if job.gpus is not None:
        return render.count(job.gpus, "GPU")
    return f"{render.count(job.nnodes, 'node')} × {render.count(job.nproc_per_node, 'GPU')}"


def _job_state(job: wire.Job, now: datetime) -> str:
    if job.state != wire.WAITING:
        since = job.started_at or job.created_at
        return job.state + (f" for {format_span((now - since).total_seconds())}" if since is not None else "")
    return f"{job.state}{render.place_text(job, now)}"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:120] if lines else ""


def as_text(tables: Iterable[Table]) -> str:
    """In columns."""
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


def as_html(tables: Iterable[Table]) -> str:
    """As HTML tables."""
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


def release(run: str) -> str:
    """Free workers that stand, all or those of one run; what was done. Raises UsageError for busy or unknown ones."""
    if not run:
        freed = crews.release()
    else:
        names = [view.run_id for view in crews.standing()]
        near = [name for name in names if name == run] or [name for name in names if name.endswith(run)]
        freed = crews.release(near[0] if len(near) == 1 else run)
    return "".join(f"freed: {nodes}\n" for nodes in freed) or "No workers stand.\n"
