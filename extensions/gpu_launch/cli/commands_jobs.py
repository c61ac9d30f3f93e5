"""`ps`, `logs`, `cancel` and `attach`."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime

import click

from gpu_launch import wire
from gpu_launch.cli import ending, finding, views
from gpu_launch.cli.completing import complete_run
from gpu_launch.cli.context import Context, json_option, pass_cli
from gpu_launch.cli.follow import Follower
from gpu_launch.cli.said import leave, terminal_columns
from gpu_launch.errors import UsageError

_TAIL = 20


def own_jobs(context: Context, *, ended: bool) -> list[wire.Job]:
    """One's own, newest first: an administrator is told of everybody's."""
    jobs = context.broker.jobs(ended=ended)
    if len({job.owner for job in jobs}) > 1 or (jobs and context.hub.user and jobs[0].owner != context.hub.user):
        jobs = [job for job in jobs if job.owner == context.user]
    return finding.newest_first(jobs)


def find_job(context: Context, text: str) -> wire.Job:
    """The job that a person means."""
    return finding.find(text, own_jobs(context, ended=True))


@click.command()
@click.option("-a", "--all", "is_all", is_flag=True, help="Those that have ended lately as well.")
@json_option
@pass_cli
def ps(context: Context, is_all: bool) -> None:
    """List your jobs: those that wait and run."""
    jobs = own_jobs(context, ended=is_all)
    now = datetime.now(UTC)
    rows = [views.job_row(job, now) for job in jobs]
    text = views.table(views.JOB_COLUMNS, rows, width=terminal_columns())
    if not rows:
        text = (
            "No job of yours is known."
            if is_all
            else "No job of yours waits or runs. gpu-launch ps -a lists ended ones."
        )
    context.said.result([views.job_json(job) for job in jobs], text)


@click.command()
@click.argument("run", metavar="RUN", shell_complete=complete_run)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended; Ctrl-C leaves it running.")
@click.option("--rank", type=click.IntRange(min=0), help="One rank's stdout and stderr, whole.")
@click.option("--tail", type=click.IntRange(min=0), metavar="LINES", help="Only so many lines of what is there (all).")
@pass_cli
def logs(context: Context, run: str, follow: bool, rank: int | None, tail: int | None) -> None:
    """Show a job's output."""
    job = _detached(find_job(context, run))
    offset = 0 if tail is None and follow else show_output(context, job, rank=rank, tail=tail)
    if not follow:
        return
    try:
        Follower(context=context, job=job, rank=rank, offset=offset).run()
    except KeyboardInterrupt:
        context.said.end_line()
        leave(130)


def show_output(context: Context, job: wire.Job, *, rank: int | None, tail: int | None) -> int:
    """What is there now, or its last lines; how many bytes there are."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    size, last, rest = 0, deque[str](maxlen=tail), ""
    with context.transfer.logs(job.id, offset=0, follow=False, rank=rank) as answer:
        while data := answer.read():
            size += len(data)
            text = decoder.decode(data)
            if tail is None:
                context.said.output(text)
            else:
                *lines, rest = (rest + text).split("\n")
                last.extend(f"{line}\n" for line in lines)
    if rest:
        last.append(rest)
    if tail != 0:
        context.said.output("".join(last) + decoder.decode(b"", final=True))
    return size


@click.command(short_help="End jobs.")
@click.argument("runs", metavar="RUN...", nargs=-1, shell_complete=complete_run)
@click.option("--all", "is_all", is_flag=True, help="All of your jobs that wait or run, notebooks' launches too.")
@json_option
@pass_cli
def cancel(context: Context, runs: Iterable[str], is_all: bool) -> None:
    """End jobs: their GPUs are free when they are gone, their output stays."""
    if bool(runs) == is_all:
        raise UsageError("Name the runs to end, or --all. gpu-launch ps lists them.")
    live = own_jobs(context, ended=not is_all)
    chosen = [job for job in live if not job.is_ended] if is_all else [finding.find(run, live) for run in runs]
    ended = []
    for job in {job.id: job for job in chosen}.values():
        ended.append(job if job.is_ended else context.broker.delete_job(job.id))
    lines = [f"{job.run_id} has ended already" if job in chosen else f"{job.run_id} is being ended" for job in ended]
    context.said.result([views.job_json(job) for job in ended], "\n".join(lines) or "There is no job to end.")


@click.command(short_help="Follow a job to its end, with its exit status.")
@click.argument("run", metavar="RUN", shell_complete=complete_run)
@click.option(
    "--tail", type=click.IntRange(min=0), default=_TAIL, show_default=True, metavar="LINES", help="Begin so far back."
)
@json_option
@pass_cli
def attach(context: Context, run: str, tail: int) -> None:
    """Follow a job to its end as `run` does, with its exit status. Ctrl-C leaves it running."""
    job = _detached(find_job(context, run))
    offset = show_output(context, job, rank=None, tail=tail)
    ending.follow_to_end(context, job, offset=offset, cancels=False)


def _detached(job: wire.Job) -> wire.Job:
    if not job.detached:
        raise UsageError(f"{job.run_id} is a notebook's launch: its notebook shows its output.")
    return job


COMMANDS: tuple[click.Command, ...] = (ps, logs, cancel, attach)
