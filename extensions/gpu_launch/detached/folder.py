"""What lies in a detached job's folder before the job is asked for. Pure, and light: a laptop uses it as well.

A notebook writes these files into `~/.gpu_launch/jobs/RUN/` itself (`submit`). A laptop sends them as a tar to
`PUT /files?path=.gpu_launch/jobs/RUN`, in this order, each with mode 0600:

    run_id = runs.new_id()
    job = order.Order(name="train.py", words=(...), folder="gpu-launch/train-3f2a")
    for name, data in folder.files(job).items(): ...
    POST /jobs {"run_id": run_id, "detached": true, "name": ..., ...}

Nothing in them depends on where the home is: `Order.folder` is below it, and what a script's words name is below that
folder. Folders that are missing, `logs` say, are made by the job.
"""

from __future__ import annotations

import json

from gpu_launch import order, runs


def files(job: order.Order) -> dict[str, bytes]:
    """Names in the run's folder, and what is in them."""
    return {
        runs.ORDER: order.dump(job).encode(),
        runs.SETTINGS: json.dumps(runs.launch_settings(is_detached=True)).encode(),
    }
