"""The files of a detached job's run folder that exist before the job is requested.

A notebook writes them into `~/.gpu_launch/jobs/RUN/` itself (`submit`). A laptop sends them as a tar to
`PUT /files?path=.gpu_launch/jobs/RUN`, in this order, each with mode 0600:

    run_id = run_folder.new_run_id()
    manifest = JobManifest(name="train.py", words=(...), folder="gpu-launch/train-3f2a")
    for name, data in job_files.build_files(manifest).items(): ...
    POST /jobs {"run_id": run_id, "detached": true, "name": ..., ...}

Nothing in them depends on the path of the home: `JobManifest.folder` is below it, and a script's words name paths below
that folder. The job makes folders that are missing, such as `logs`. A laptop imports this module, so it stays light.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from gpu_launch.common import run_folder
from gpu_launch.common.job_manifest import JobManifest, dump_json

#: Set for each task of an array.
INDEX_VARIABLE = "GPU_LAUNCH_ARRAY_INDEX"
#: SkyPilot's names for the number of a job among several of one task file, from 0, and for how many they are.
_JOB_RANK, _JOB_COUNT = "SKYPILOT_JOB_RANK", "SKYPILOT_NUM_JOBS"


def split_manifest(manifest: JobManifest, run_id: str, indexes: Sequence[int]) -> dict[str, JobManifest]:
    """Return each task's manifest, by the run id that the broker gives the task: `RUN-0`, `RUN-1`, …"""
    return {
        f"{run_id}-{number}": replace(
            manifest,
            environ=manifest.environ
            | {INDEX_VARIABLE: str(index)}
            | ({} if manifest.task is None else {_JOB_RANK: str(number), _JOB_COUNT: str(len(indexes))}),
        )
        for number, index in enumerate(indexes)
    }


def build_files(manifest: JobManifest, *, python: str = "") -> dict[str, bytes]:
    """Return the files' contents, by their names in the run folder.

    Args:
        python: The job's interpreter, in the home on the cluster; empty for the image's.
    """
    return {
        run_folder.MANIFEST: dump_json(manifest).encode(),
        run_folder.SETTINGS: json.dumps(run_folder.build_settings(is_detached=True, python=python)).encode(),
    }
