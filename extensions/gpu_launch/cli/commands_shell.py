"""`shell`."""

from __future__ import annotations

import shlex

import click

from gpu_launch import wire
from gpu_launch.cli.commands_jobs import find_job
from gpu_launch.cli.completing import complete_run
from gpu_launch.cli.context import Context, pass_cli
from gpu_launch.cli.ending import exit_status
from gpu_launch.cli.said import leave
from gpu_launch.errors import UsageError


@click.command(short_help="Open a terminal in a running job.")
@click.argument("run", metavar="RUN", shell_complete=complete_run)
@click.option("--worker", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of this node.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND]...")
@pass_cli
def shell(context: Context, run: str, worker: int, command: tuple[str, ...]) -> None:
    """Open a terminal in a running job, or run COMMAND there; the exit status is its own."""
    job = find_job(context, run)
    if job.state not in (wire.RUNNING, wire.PREEMPTING):
        raise UsageError(f"{job.run_id} does not run: its state is {job.state}.")
    if worker not in {one.index for one in job.workers}:
        has = ", ".join(f"{one.index} ({one.node})" for one in job.workers)
        raise UsageError(f"--worker {worker}: {job.run_id} has the workers {has}.")
    from gpu_launch.cli.shells import open_shell

    opened = open_shell(context.hub, job.id, worker=worker, command=shlex.join(command))
    code = opened.run()
    if code:
        leave(exit_status(code))


COMMANDS: tuple[click.Command, ...] = (shell,)
