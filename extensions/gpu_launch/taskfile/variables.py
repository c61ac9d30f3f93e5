"""The SKYPILOT_* variables of a task's commands."""

from __future__ import annotations

import json
from collections.abc import Sequence


def build_variables(
    *,
    rank: int,
    ips: Sequence[str],
    gpus_per_node: int,
    task_id: str,
    cluster: str = "gpuhub",
    user: str = "",
) -> dict[str, str]:
    """Return the variables of `setup` and `run` on the node of this rank.

    SkyPilot gives `setup` the variables with SETUP in their names and `run` the others. Here both get all of them: a
    task has the same nodes in both, and commands that test whether a variable is set work.

    Args:
        rank: The node's rank.
        ips: Addresses of all nodes by rank.
        gpus_per_node: GPUs on each node.
        task_id: The same for all starts of the task.
        cluster: Name of the cluster.
        user: Owner of the task.
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
    """Return an id in SkyPilot's format: `sky-20260314-101500-3f2a91_train_1` for a task named train."""
    return f"sky-{run_id.removeprefix('run-')}_{name or 'task'}_1"
