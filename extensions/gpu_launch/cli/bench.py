"""The command `bench`: measures cards and the network between them, for predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gpu_launch.cli.context import Context, json_option, pass_context
from gpu_launch.cli.submission import job_submission
from gpu_launch.cli.submission.run import launch_options
from gpu_launch.cli.submission.upload import DEFAULT_MAX_BYTES
from gpu_launch.errors import UsageError
from gpu_launch.options.definition import BENCH_MODULE, BENCH_OPTIONS
from gpu_launch.options.option import Surface

_OPTIONS = tuple(option for option in BENCH_OPTIONS if Surface.COMMAND in option.surfaces)


@click.command()
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="GPUs in all, on as few nodes as are free.")
@launch_options(_OPTIONS)
@click.option("--profile", metavar="NAME", help="The profile whose image the job runs in.")
@json_option
@pass_context
def bench(context: Context, /, **given: Any) -> None:
    """Measure GPUs, the all-reduces between them, and how fast they read your home.

    It takes about a minute. The figures are kept in your home on the cluster, for `gpu-launch run --predict`.
    """
    values = {str(option.name): given[str(option.name)] for option in _OPTIONS}
    if values["nnodes"] is not None and values["nnodes"][0] is not None:
        raise UsageError("--nnodes MIN:MAX: one number of nodes is needed, all of which are measured together.")
    asked = job_submission.RunArguments(
        script=BENCH_MODULE,
        arguments=(),
        values={name: value for name, value in values.items() if value not in (None, False)} | {"module": True},
        gpus=given["gpus"],
        name="bench",
        profile=given["profile"],
        no_workdir=True,
        most_bytes=DEFAULT_MAX_BYTES,
        here=Path.cwd(),
    )
    job_submission.run(context, job_submission.from_script(context, asked), detach=False, dry_run=False)


COMMANDS: tuple[click.Command, ...] = (bench,)
