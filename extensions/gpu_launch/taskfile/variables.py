"""The SKYPILOT_* variables that a task's commands find. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence


def environ(
    *,
    rank: int,
    ips: Sequence[str],
    gpus_per_node: int,
    task_id: str,
    cluster: str = "gpuhub",
    user: str = "",
) -> dict[str, str]:
    """What `setup` and `run` find on the node of this rank.

    `ips` are all nodes' addresses by rank, the head node's first. `task_id` stays the same when the task is started
    anew. `user` is whose task it is; `cluster` names the cluster.

    SkyPilot gives `setup` the variables with SETUP in their names and `run` the others. Here both find all of them: the
    nodes of a task are the same in both, and commands that only ask whether a variable is set do as they should.
    """
    addresses = "\n".join(ips)
    return {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": addresses,
        "SKYPILOT_NUM_NODES": str(len(ips)),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus_per_node),
        "SKYPILOT_SETUP_NODE_RANK": str(rank),
        "SKYPILOT_SETUP_NODE_IPS": addresses,
        "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": str(gpus_per_node),
        "SKYPILOT_TASK_ID": task_id,
        "SKYPILOT_CLUSTER_INFO": json.dumps({"cluster_name": cluster, "cloud": "gpuhub", "region": "", "zone": ""}),
        "SKYPILOT_USER": user,
    }


def build_task_id(run_id: str, name: str) -> str:
    """In SkyPilot's shape, `sky-<when>_<cluster or name>_<number>`: `sky-20260314-101500-3f2a91_train_1`."""
    return f"sky-{run_id.removeprefix('run-')}_{name or 'task'}_1"
