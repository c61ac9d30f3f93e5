"""`gpu-launch run --array`: many tasks of one GPU each from one command, each with its own index."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from gpu_launch.common.job_manifest import JobManifest
from gpu_launch.errors import UsageError
from gpu_launch.options.definition import LaunchOptions

#: Set for each task.
INDEX_VARIABLE = "GPU_LAUNCH_ARRAY_INDEX"
#: The broker takes no more tasks in one request.
MAX_TASKS = 1000
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6})(?::(\d{1,6}))?)?")


def parse_indexes(text: str) -> tuple[int, ...]:
    """Return the indexes in `0-9`, `0-100:10`, `1,3,5` or a mixture of them, each once and in order.

    Raises:
        UsageError: for anything else, for too many, and for a limit of running tasks, which the broker does not have.
    """
    ranges, has_limit, limit = text.partition("%")
    if has_limit:
        raise UsageError(
            f"--array {text}: the broker has no limit for the running tasks of one array, so leave out %{limit}. Your "
            "limits, and the queue, apply to every task."
        )
    indexes: dict[int, None] = {}
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else -1
        step = int(match[3] or 1) if match else 1
        if match is None or last < first or step < 1:
            raise UsageError(f"--array {text}: indexes such as 0-9, 0-100:10 or 1,3,5 are needed.")
        indexes |= dict.fromkeys(range(first, last + 1, step))
    if len(indexes) > MAX_TASKS:
        raise UsageError(f"--array {text}: {len(indexes)} tasks are more than one array may have, {MAX_TASKS}.")
    return tuple(indexes)


def check_options(options: LaunchOptions) -> None:
    """Refuse options that ask for more than one GPU for each task.

    Raises:
        UsageError: naming the option.
    """
    if options.least_nnodes is not None:
        raise UsageError("--array and --nnodes MIN:MAX exclude each other: each task of an array has one GPU.")
    for flag, value in (("--nnodes", options.nnodes), ("--nproc-per-node", options.nproc_per_node)):
        if value != 1:
            raise UsageError(f"--array and {flag} {value} exclude each other: each task of an array has one GPU.")


def split_manifest(manifest: JobManifest, run_id: str, indexes: Sequence[int]) -> dict[str, JobManifest]:
    """Return each task's manifest, by the run id that the broker gives the task: `RUN-0`, `RUN-1`, …"""
    return {
        f"{run_id}-{number}": replace(manifest, environ=manifest.environ | {INDEX_VARIABLE: str(index)})
        for number, index in enumerate(indexes)
    }
