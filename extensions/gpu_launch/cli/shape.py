"""How many nodes, with how many GPUs each, when only a number of GPUs was asked for. Pure."""

from __future__ import annotations

from gpu_launch.demand import Demand
from gpu_launch.errors import UsageError
from gpu_launch.wire import Cluster, Gpu

_FREE, _UP = "free", "up"


def choose(gpus: int, cluster: Cluster, demand: Demand) -> tuple[int, int]:
    """Nodes, and GPUs a node, `gpus` in all: on as few nodes as are free now, else on as few as there can be.

    All nodes get the same number, as torchrun's ranks are counted. Raises UsageError where the cluster never has them.
    """
    ways = [(gpus // each, each) for each in range(gpus, 0, -1) if gpus % each == 0]
    for only_free in (True, False):
        found = [way for way in ways if _fits(way, cluster, demand, only_free=only_free)]
        if found:
            return found[0]
    has = sum(demand.accepts(card) for node in cluster.nodes for card in node.gpus)
    one_model = ", all of one model" if demand.same_model else ""
    raise UsageError(
        f"--gpus {gpus}: the cluster has {demand.describe(has)}{one_model} in all, and no {gpus} of them on nodes with "
        "the same number each. `gpu-launch status` shows them; --nnodes and --nproc-per-node say it exactly."
    )


def check(nodes: int, each: int, cluster: Cluster, demand: Demand) -> None:
    """Raises UsageError where the cluster never has so many nodes with so many GPUs each, however long one waits."""
    if _fits((nodes, each), cluster, demand, only_free=False):
        return
    what = demand.describe(each) + (", all of one model" if demand.same_model else "")
    if nodes == 1:
        raise UsageError(f"{what} is more than any node of the cluster has. gpu-launch status shows them.")
    able = ", ".join(node.name for node in cluster.nodes if demand.most_on_a_node(node.gpus) >= each)
    raise UsageError(
        f"{what} on each of {nodes} nodes is more than the cluster has: {able or 'no node'} could take part. "
        "gpu-launch status shows them."
    )


def _fits(way: tuple[int, int], cluster: Cluster, demand: Demand, *, only_free: bool) -> bool:
    nodes, each = way
    models = sorted({card.model for node in cluster.nodes for card in node.gpus}) if demand.same_model else [""]
    for model in models:
        able = 0
        for node in cluster.nodes:
            cards = [card for card in node.gpus if not model or card.model == model]
            usable = [card for card in cards if not only_free or (node.state in ("", _UP) and _is_free(card))]
            is_whole = not demand.exclusive or len(usable) == len(node.gpus)
            able += is_whole and demand.most_on_a_node(usable) >= each
        if able >= nodes:
            return True
    return False


def _is_free(card: Gpu) -> bool:
    return card.state == _FREE if card.state else not card.holder
