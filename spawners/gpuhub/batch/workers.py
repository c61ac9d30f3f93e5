"""The script of a launch's job: a worker on each of its nodes. Pure; every text that is not this module's own stands in
it quoted for the shell.

Nothing in it is secret: a worker asks nobody, and finds the way to its launch in its user's home.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from gpuhub.batch.runtime import Runtime, fill, find_runtime, tell_places, tell_user
from gpuhub.settings import Cluster

_PROGRAM = "gpu-launch-worker"
#: In the home; the notebook has made it before it asked for workers.
_LOGS = ".gpu_launch/jobs/{run}/logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """What one job's script is made of."""

    cluster: Cluster
    user: str
    #: The run whose folder the workers read.
    run_id: str
    #: Of the job's first worker, among those of the run.
    first_worker: int
    has_gpus: bool
    #: CPUs of each worker.
    cpus: int
    #: It goes on when one of its nodes fails.
    survives_nodes: bool
    #: Its first worker leads the others, and the job ends with it.
    is_detached: bool


def log_path(run_id: str, slurm_job: int) -> str:
    """The file with what Slurm and the workers' starts say, for a person."""
    return f"~/{_LOGS.format(run=run_id)}/slurm-{slurm_job}.log"


def build_workers_script(workers: Workers) -> str:
    """The job's whole script, for bash."""
    runtime = find_runtime(workers.cluster, workers.user, has_gpus=workers.has_gpus, passed_on=("GPUHUB_JOB_NODES",))
    commands = workers.cluster.slurm.commands
    texts = {
        "home": runtime.home,
        "user": workers.user,
        # srun and scontrol are where the head node has them, or where every program is.
        "path": runtime.path if commands is None else f"{runtime.path}:{commands}",
        "logs": _LOGS.format(run=workers.run_id),
        "told": json.dumps(_told(workers, runtime), sort_keys=True),
    }
    run = _lead(workers, runtime) if workers.is_detached else _step(workers, runtime)
    return fill("workers.template", texts=texts, lines={"run": run})


def _step(workers: Workers, runtime: Runtime) -> str:
    """One task on each node. The job becomes the step: Slurm's signals are the workers', and so is the job's end."""
    count = "$SLURM_JOB_NUM_NODES"
    return f'exec {_srun(workers, count)} {shlex.join(runtime.on_each_node())} <<<"$told"'


def _lead(workers: Workers, runtime: Runtime) -> str:
    """The first worker is the job's own process, with which Slurm ends all of it, and whose exit code it tells."""
    count = "$((SLURM_JOB_NUM_NODES - 1))"
    others = f'{_srun(workers, count)} --relative=1 {shlex.join(runtime.on_each_node())} <<<"$told" &'
    lines = (
        'if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then',
        f"  {others}",
        "fi",
        *([runtime.prepare] if runtime.prepare else []),
        f'exec {shlex.join(runtime.command)} <<<"$told"',
    )
    return "\n".join(lines)


def _srun(workers: Workers, count: str) -> str:
    words = (
        *("srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--cpus-per-task={workers.cpus}"),
        # What becomes of a worker that ends is its launch's to say: the others go on, however long.
        *("--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--export=ALL"),
        *(["--no-kill"] if workers.survives_nodes else []),
    )
    return " ".join(words)


def _told(workers: Workers, runtime: Runtime) -> dict[str, object]:
    """What `on_node` reads."""
    return tell_places(workers.cluster) | {
        "first_worker": workers.first_worker,
        "is_detached": workers.is_detached,
        "command": [f"{runtime.programs}{_PROGRAM}"],
        "environment": {
            "OMP_NUM_THREADS": str(workers.cpus),
            "GPU_LAUNCH_RUN": workers.run_id,
            **tell_user(workers.user, runtime),
        },
    }
