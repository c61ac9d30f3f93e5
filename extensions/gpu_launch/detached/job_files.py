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

from gpu_launch.common import run_folder
from gpu_launch.common.job_manifest import JobManifest, dump_json


def build_files(manifest: JobManifest) -> dict[str, bytes]:
    """Return the files' contents, by their names in the run folder."""
    return {
        run_folder.ORDER: dump_json(manifest).encode(),
        run_folder.SETTINGS: json.dumps(run_folder.build_settings(is_detached=True)).encode(),
    }
