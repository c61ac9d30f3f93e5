"""The command `stacks`: where all ranks of a run are."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import click

from gpu_launch.cli.connection.http import read_first_file
from gpu_launch.cli.context import Context, json_option, pass_context
from gpu_launch.cli.job_lookup import complete_run
from gpu_launch.cli.jobs import find_job
from gpu_launch.common import run_folder
from gpu_launch.errors import BrokerError, UsageError
from gpu_launch.output import stack_request


@click.command(short_help="Show where all ranks of a run are.")
@click.argument("run", metavar="RUN", shell_complete=complete_run)
@click.option("--full", is_flag=True, help="Also show all threads of every rank.")
@json_option
@pass_context
def stacks(context: Context, run: str, full: bool) -> None:
    """Show where all ranks of a run are, grouped by the line of your code and the function that it called.

    The ranks write their Python stacks without being stopped, also while they hang in native code. It works for a
    notebook's launch and the ranks of %%gpu_ranks as well.
    """
    job = find_job(context, run)
    if job.is_ended:
        raise UsageError(f"{job.run_id} has ended: gpu-launch logs {job.run_id} shows its output.")
    answer = ask_for_stacks(context, job.run_id)
    context.console.print_result(answer["groups"], str(answer["full" if full else "text"]).rstrip())


def ask_for_stacks(context: Context, run_id: str) -> dict[str, Any]:
    """Write the request into the run's folder in the home on the cluster, and wait for the answer there."""
    request, folder = stack_request.build_request(), f".gpu_launch/jobs/{run_id}"
    member = tarfile.TarInfo(run_folder.STACKS_REQUEST)
    member.size, member.mode = len(request), 0o600

    def write(tar: tarfile.TarFile) -> None:
        tar.addfile(member, io.BytesIO(request.encode()))

    def read() -> bytes | None:
        try:
            with context.transfer.get(f"{folder}/{run_folder.STACKS}") as response:
                return read_first_file(response)
        except BrokerError as error:
            if error.status == 404:
                return None
            raise

    context.transfer.put(folder, write)
    found: dict[str, Any] = stack_request.await_answer(read, request, run_id=run_id)
    return found


COMMANDS: tuple[click.Command, ...] = (stacks,)
