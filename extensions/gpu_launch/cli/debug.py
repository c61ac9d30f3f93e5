"""The command `debug`: the debugger on one rank of a run."""

from __future__ import annotations

import os
import shlex
import sys

import click

from gpu_launch import environment
from gpu_launch.broker.models import Job
from gpu_launch.cli import stacks
from gpu_launch.cli.connection.credentials import find_notebook_hub
from gpu_launch.cli.context import Context, exit_with, pass_context
from gpu_launch.cli.follow import convert_exit_code
from gpu_launch.cli.job_lookup import complete_run
from gpu_launch.cli.jobs import find_job
from gpu_launch.cli.shell import open_shell
from gpu_launch.errors import UsageError
from gpu_launch.options import value_types


@click.command(short_help="Debug one rank of a run.")
@click.argument("run", metavar="RUN", shell_complete=complete_run)
@click.option(
    "--rank",
    type=click.IntRange(min=0, max=value_types.MAX_RANK),
    default=0,
    show_default=True,
    metavar="N",
    help="The rank to stop.",
)
@click.option(
    "--listen",
    type=click.IntRange(min=1024, max=65535),
    default=None,
    metavar="PORT",
    help="Let an editor attach instead: debugpy listens on this port of localhost in the rank's container, which "
    "ssh -L forwards.",
)
@click.option("--here", is_flag=True, hidden=True, help="The rank runs in this container, whatever its run.")
@pass_context
def debug(context: Context, run: str, rank: int, listen: int | None, here: bool) -> None:
    """Stop one rank of a run, and debug it in this terminal; the other ranks wait in their next collective.

    The rank stops as soon as it runs Python code, or where it waits at breakpoint() already. It works for a notebook's
    launch and the ranks of %%gpu_ranks as well.
    """
    code = _debug_here("" if here else run, rank, listen, is_sure=here)
    if code is None:
        job = find_job(context, run)
        if job.is_ended:
            raise UsageError(f"{job.run_id} has ended: gpu-launch logs {job.run_id} shows its output.")
        worker = _find_worker(context, job, rank)
        if worker is None:
            code = _debug_here("", rank, listen, is_sure=True)
        else:
            words = ["gpu-launch", "debug", "--here", job.run_id, "--rank", str(rank)]
            words += ["--listen", str(listen)] if listen else []
            code = open_shell(context.hub, job.id, worker=worker, command=shlex.join(words)).run()
            if listen and not code:
                context.console.write_output(_describe_tunnel(job, worker, listen))
    if code:
        exit_with(convert_exit_code(code))


def _debug_here(run: str, rank: int, listen: int | None, *, is_sure: bool = False) -> int | None:
    """Debug a rank that runs in this very container, such as in a notebook's own.

    Returns:
        The exit code; None if there is no such rank, unless it `is_sure` to be here.
    """
    if sys.platform != "linux":
        return None
    from gpu_launch.worker import debugger_client

    if not is_sure and debugger_client.find_rank(rank, run) is None:
        return None
    return debugger_client.run_terminal(rank, run_id=run, port=listen or 0)


def _find_worker(context: Context, job: Job, rank: int) -> int | None:
    """Return the worker in which a rank runs, as the run itself says; None for this very container.

    Raises:
        UsageError: There is no such rank, or it runs in the container of a notebook that is not this one.
    """
    groups = stacks.ask_for_stacks(context, job.run_id)["groups"]
    nodes = {int(number): str(node) for group in groups for number, node in group["nodes"].items()}
    if rank not in nodes:
        raise UsageError(f"--rank {rank}: {job.run_id} has the ranks {', '.join(map(str, sorted(nodes))) or 'none'}.")
    for member in job.workers:
        if member.node == nodes[rank]:
            return member.index
    if find_notebook_hub(os.environ) is not None and environment.read().node == nodes[rank]:
        return None
    raise UsageError(
        f"Rank {rank} runs in the notebook's own container on {nodes[rank]}: use a terminal of that JupyterLab."
    )


def _describe_tunnel(job: Job, worker: int, port: int) -> str:
    return (
        f"Forward the port:  ssh -N -L {port}:localhost:{port} gpuhub-{job.run_id}.{worker}\n"
        f'Then attach in VS Code: {{"type": "debugpy", "request": "attach", '
        f'"connect": {{"host": "localhost", "port": {port}}}}}\n'
    )


COMMANDS: tuple[click.Command, ...] = (debug,)
