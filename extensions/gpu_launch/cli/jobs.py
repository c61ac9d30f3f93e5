"""The commands `ps`, `logs`, `cancel` and `attach`."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

import click

from gpu_launch.broker import models
from gpu_launch.cli import follow as ending
from gpu_launch.cli import tables
from gpu_launch.cli.context import Context, exit_with, json_option, pass_context, terminal_columns
from gpu_launch.cli.follow import Follower
from gpu_launch.cli.job_lookup import complete_run, match_job, match_jobs, sort_newest_first
from gpu_launch.errors import UsageError

_TAIL_LINES = 20


def list_own_jobs(context: Context, *, ended: bool) -> list[models.Job]:
    """Return the user's own jobs, newest first: administrators get the jobs of all users."""
    jobs = context.broker.list_jobs(ended=ended)
    if len({job.owner for job in jobs}) > 1 or (jobs and context.hub.user and jobs[0].owner != context.hub.user):
        jobs = [job for job in jobs if job.owner == context.user]
    return sort_newest_first(jobs)


def find_job(context: Context, text: str) -> models.Job:
    """Return the job that the user named."""
    return match_job(text, list_own_jobs(context, ended=True))


def build_port_url(context: Context, job: models.Job) -> str:
    """Return the address of a job's server, for browsers and for programs with a token."""
    return f"{context.hub.broker_url}/ports/{job.id}/"


def note_port(context: Context, job: models.Job) -> None:
    """Print where the job's server is reached, if it has one."""
    if job.port is not None:
        users = "".join(f" and {name}" for name in job.port_users)
        context.console.print_note(
            f"gpu-launch: port {job.port} is at {build_port_url(context, job)} for you{users}, until the job ends"
        )


@click.command()
@click.argument("array", metavar="[ARRAY]", required=False, shell_complete=complete_run)
@click.option("-a", "--all", "is_all", is_flag=True, help="Also list jobs that ended recently.")
@json_option
@pass_context
def ps(context: Context, array: str | None, is_all: bool) -> None:
    """List your jobs: those that wait and run; or all tasks of one array or job group, with their states counted."""
    if array is not None:
        _list_tasks(context, array)
        return
    jobs = list_own_jobs(context, ended=is_all)
    now = datetime.now(UTC)
    rows = [tables.build_job_row(job, now) for job in jobs]
    text = tables.format_table(tables.JOB_COLUMNS, rows, width=terminal_columns())
    if not rows:
        text = (
            "You have no jobs." if is_all else "You have no waiting or running jobs. gpu-launch ps -a lists ended ones."
        )
    context.console.print_result([tables.build_job_json(job) for job in jobs], text)


def _list_tasks(context: Context, text: str) -> None:
    jobs = match_jobs(text, list_own_jobs(context, ended=True))
    if jobs[0].array is None:
        raise UsageError(f"{jobs[0].run_id} is a job of its own, and no array or job group. gpu-launch ps -a lists it.")
    tasks = sorted(jobs, key=lambda job: int(job.run_id.rpartition("-")[2]))
    now = datetime.now(UTC)
    rows = [tables.build_job_row(job, now) for job in tasks]
    table = tables.format_table(tables.JOB_COLUMNS, rows, width=terminal_columns())
    context.console.print_result(
        [tables.build_job_json(job) for job in tasks], f"{table}\n{tables.format_task_counts(tasks)}"
    )


@click.command()
@click.argument("run", metavar="RUN", shell_complete=complete_run)
@click.option("-f", "--follow", is_flag=True, help="Follow until the job has ended; Ctrl-C leaves it running.")
@click.option("--rank", type=click.IntRange(min=0), help="All of one rank's stdout and stderr.")
@click.option(
    "--tail", type=click.IntRange(min=0), metavar="LINES", help="Show only the last LINES lines so far (all)."
)
@json_option
@pass_context
def logs(context: Context, run: str, follow: bool, rank: int | None, tail: int | None) -> None:
    """Show a job's output."""
    if follow and context.console.is_json:
        raise UsageError("--json prints one document, without --follow. gpu-launch attach --json waits for the end.")
    job = _check_detached(find_job(context, run))
    if context.console.is_json:
        texts: list[str] = []
        _read_output(context, job, rank=rank, tail=tail, write=texts.append)
        context.console.print_result(
            {"run": job.run_id, "state": tables.derive_state(job), "output": "".join(texts)}, ""
        )
        return
    offset = 0 if tail is None and follow else show_output(context, job, rank=rank, tail=tail)
    if not follow:
        return
    try:
        Follower(context=context, job=job, rank=rank, offset=offset).run()
    except KeyboardInterrupt:
        context.console.clear_progress()
        exit_with(130)


def show_output(context: Context, job: models.Job, *, rank: int | None, tail: int | None) -> int:
    """Write the current output, or its last lines; return its size in bytes."""
    return _read_output(context, job, rank=rank, tail=tail, write=context.console.write_output)


def _read_output(
    context: Context, job: models.Job, *, rank: int | None, tail: int | None, write: Callable[[str], object]
) -> int:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    size, last, rest = 0, deque[str](maxlen=tail), ""
    with context.transfer.open_logs(job.id, offset=0, follow=False, rank=rank) as answer:
        while data := answer.read():
            size += len(data)
            text = decoder.decode(data)
            if tail is None:
                write(text)
            else:
                *lines, rest = (rest + text).split("\n")
                last.extend(f"{line}\n" for line in lines)
    if rest:
        last.append(rest)
    if tail != 0:
        write("".join(last) + decoder.decode(b"", final=True))
    return size


@click.command(short_help="End jobs.")
@click.argument("runs", metavar="RUN...", nargs=-1, shell_complete=complete_run)
@click.option("--all", "is_all", is_flag=True, help="All of your jobs that wait or run, notebooks' launches too.")
@json_option
@pass_context
def cancel(context: Context, runs: Iterable[str], is_all: bool) -> None:
    """End jobs: their GPUs are free when they are gone, their output stays."""
    if bool(runs) == is_all:
        raise UsageError("Name the runs to end, or --all. gpu-launch ps lists them.")
    live = list_own_jobs(context, ended=not is_all)
    selected = (
        [job for job in live if not job.is_ended] if is_all else [job for run in runs for job in match_jobs(run, live)]
    )
    ended = []
    for job in {job.id: job for job in selected}.values():
        ended.append(job if job.is_ended else context.broker.delete_job(job.id))
    lines = [f"{job.run_id} has already ended" if job in selected else f"{job.run_id} is being ended" for job in ended]
    context.console.print_result(
        [tables.build_job_json(job) for job in ended], "\n".join(lines) or "There is no job to end."
    )


@click.command(short_help="Follow a job to its end, with its exit status.")
@click.argument("run", metavar="RUN", shell_complete=complete_run)
@click.option(
    "--tail",
    type=click.IntRange(min=0),
    default=_TAIL_LINES,
    show_default=True,
    metavar="LINES",
    help="Begin with the last LINES lines.",
)
@json_option
@pass_context
def attach(context: Context, run: str, tail: int) -> None:
    """Follow a job to its end as `run` does, with its exit status. Ctrl-C leaves it running."""
    job = _check_detached(find_job(context, run))
    offset = show_output(context, job, rank=None, tail=tail)
    ending.follow_to_end(context, job, offset=offset, cancels=False)


def _check_detached(job: models.Job) -> models.Job:
    if not job.detached:
        raise UsageError(f"{job.run_id} is a notebook's launch: its notebook shows its output.")
    return job


COMMANDS: tuple[click.Command, ...] = (ps, logs, cancel, attach)
