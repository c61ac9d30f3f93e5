"""Builds the script of a launch's Slurm job, which runs a worker on each node; inserted texts are quoted for the shell.

It contains no secret, because a worker calls no API and finds its launch through files in its user's home.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from gpuhub.config.settings import ClusterSettings
from gpuhub.slurm_jobs.runtime import (
    JobRuntime,
    build_node_tables,
    build_runtime,
    build_user_environment,
    fill_template,
)

_PROGRAM = "gpu-launch-worker"
#: Folder in the home; the notebook has created it before it requests workers.
_LOGS = ".gpu_launch/jobs/{run}/logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerScriptSpec:
    """Content of the script of one job."""

    cluster: ClusterSettings
    user: str
    #: The run whose folder the workers read.
    run_id: str
    #: Index of the job's first worker among the workers of the run.
    first_worker: int
    has_gpus: bool
    #: CPUs of each worker.
    cpus: int
    #: Whether the job continues when one of its nodes fails.
    survives_nodes: bool
    #: Whether its first worker leads the others, and the job ends with it.
    is_detached: bool


def build_log_path(run_id: str, slurm_job: int) -> str:
    """Return the path of the log of Slurm and the workers' starts, for users."""
    return f"~/{_LOGS.format(run=run_id)}/slurm-{slurm_job}.log"


def build_worker_script(spec: WorkerScriptSpec) -> str:
    """Build the job's script for bash."""
    runtime = build_runtime(spec.cluster, spec.user, has_gpus=spec.has_gpus, forwarded=("GPUHUB_JOB_NODES",))
    commands = spec.cluster.slurm.commands
    texts = {
        "home": runtime.home,
        "user": spec.user,
        # srun and scontrol are in the same folder as on the head node, or on the usual PATH.
        "path": runtime.path if commands is None else f"{runtime.path}:{commands}",
        "logs": _LOGS.format(run=spec.run_id),
        "instructions": json.dumps(_build_instructions(spec, runtime), sort_keys=True),
    }
    run = _format_detached(spec, runtime) if spec.is_detached else _format_step(spec, runtime)
    return fill_template("workers.template", texts=texts, lines={"run": run})


def _format_step(spec: WorkerScriptSpec, runtime: JobRuntime) -> str:
    """Return the command that runs one task per node. It replaces the script, so signals reach the workers."""
    count = "$SLURM_JOB_NUM_NODES"
    return f'exec {_format_srun(spec, count)} {shlex.join(runtime.build_step_command())} <<<"$instructions"'


def _format_detached(spec: WorkerScriptSpec, runtime: JobRuntime) -> str:
    """Return the commands of a detached job, whose own process is the first worker.

    Slurm ends the whole job with this process and reports its exit code.
    """
    count = "$((SLURM_JOB_NUM_NODES - 1))"
    others = f'{_format_srun(spec, count)} --relative=1 {shlex.join(runtime.build_step_command())} <<<"$instructions" &'
    lines = (
        'if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then',
        f"  {others}",
        "fi",
        *([runtime.prepare] if runtime.prepare else []),
        f'exec {shlex.join(runtime.command)} <<<"$instructions"',
    )
    return "\n".join(lines)


def _format_srun(spec: WorkerScriptSpec, count: str) -> str:
    words = (
        *("srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--cpus-per-task={spec.cpus}"),
        # The launch handles the end of a worker, so the others continue without a time limit.
        *("--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--export=ALL"),
        *(["--no-kill"] if spec.survives_nodes else []),
    )
    return " ".join(words)


def _build_instructions(spec: WorkerScriptSpec, runtime: JobRuntime) -> dict[str, object]:
    """Build the instructions for `node_main`."""
    return build_node_tables(spec.cluster) | {
        "first_worker": spec.first_worker,
        "is_detached": spec.is_detached,
        "command": [f"{runtime.programs}{_PROGRAM}"],
        "environment": {
            "OMP_NUM_THREADS": str(spec.cpus),
            "GPU_LAUNCH_RUN": spec.run_id,
            **build_user_environment(spec.user, runtime),
        },
    }
