"""Numbers of nodes and of GPUs on each that the cluster can give a job."""

from __future__ import annotations

from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.broker.models import Cluster, Gpu
from gpu_launch.errors import UsageError

#: States of a GPU and of a node.
_FREE, _UP = "free", "up"


def choose_layout(gpus: int, cluster: Cluster, demand: GpuRequest) -> tuple[int, int]:
    """Return the numbers of nodes and of GPUs on each node, `gpus` in total.

    The nodes are as few as possible, preferably free ones. All nodes get the same number, because torchrun counts ranks
    that way.

    Raises:
        UsageError: The cluster never has such nodes.
    """
    layouts = [(gpus // each, each) for each in range(gpus, 0, -1) if gpus % each == 0]
    for only_free in (True, False):
        fitting = [layout for layout in layouts if _fits(layout, cluster, demand, only_free=only_free)]
        if fitting:
            return fitting[0]
    available = sum(demand.accepts(gpu) for node in cluster.nodes for gpu in node.gpus)
    one_model = ", all of one model" if demand.same_model else ""
    raise UsageError(
        f"--gpus {gpus}: the cluster has {demand.describe(available)}{one_model} in total, but not {gpus} of them on "
        "nodes with the same number each. `gpu-launch status` shows them; --nnodes and --nproc-per-node set the "
        "numbers exactly."
    )


def check_layout(nodes: int, each: int, cluster: Cluster, demand: GpuRequest) -> None:
    """Check that the cluster can have `nodes` nodes with `each` GPUs, however long the job waits.

    Raises:
        UsageError: The cluster is too small.
    """
    if _fits((nodes, each), cluster, demand, only_free=False):
        return
    demanded = demand.describe(each) + (", all of one model" if demand.same_model else "")
    if nodes == 1:
        raise UsageError(f"{demanded} is more than any node of the cluster has. gpu-launch status shows them.")
    able_nodes = ", ".join(node.name for node in cluster.nodes if demand.count_usable(node.gpus) >= each)
    raise UsageError(
        f"{demanded} on each of {nodes} nodes is more than the cluster has: {able_nodes or 'no node'} could take part. "
        "gpu-launch status shows them."
    )


def _fits(layout: tuple[int, int], cluster: Cluster, demand: GpuRequest, *, only_free: bool) -> bool:
    nodes, each = layout
    models = sorted({gpu.model for node in cluster.nodes for gpu in node.gpus}) if demand.same_model else [""]
    for model in models:
        able_nodes = 0
        for node in cluster.nodes:
            if node.guest != demand.guests:
                continue
            gpus = [gpu for gpu in node.gpus if not model or gpu.model == model]
            usable = [gpu for gpu in gpus if not only_free or (node.state in ("", _UP) and _is_free(gpu))]
            is_exclusive = not demand.exclusive or len(usable) == len(node.gpus)
            able_nodes += is_exclusive and demand.count_usable(usable) >= each
        if able_nodes >= nodes:
            return True
    return False


def _is_free(card: Gpu) -> bool:
    return card.state == _FREE if card.state else not card.holder
