"""On how many nodes a number of GPUs is requested."""

from __future__ import annotations

import pytest

from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.broker.models import Cluster, Gpu, Node
from gpu_launch.cli.submission import node_layout
from gpu_launch.errors import UsageError


def _gpu(node: str, model: str = "RTX 5090", holder: str = "", state: str = "") -> Gpu:
    return Gpu(uuid=f"{node}-{model}", node=node, model=model, memory_mib=32000, holder=holder, state=state)


def _cluster(**nodes: str) -> Cluster:
    """Nodes by their cards: `a` and `b` are models, capitals are held."""
    return Cluster(
        nodes=tuple(
            Node(
                name=name,
                gpus=tuple(_gpu(name, card.lower(), holder="ben" if card.isupper() else "") for card in cards),
                state="up",
            )
            for name, cards in nodes.items()
        )
    )


@pytest.mark.parametrize(
    ("gpus", "cluster", "demand", "found"),
    [
        (4, _cluster(one="aaaa", two="aaaa"), GpuRequest(), (1, 4)),
        (4, _cluster(one="aaAA", two="aaAA"), GpuRequest(), (2, 2)),
        (4, _cluster(one="aaAA", two="aAAA"), GpuRequest(), (1, 4)),
        (6, _cluster(one="aaaa", two="aaaa"), GpuRequest(), (2, 3)),
        (2, _cluster(one="ab", two="a"), GpuRequest(same_model=True), (2, 1)),
        (2, _cluster(one="aB", two="ab", three="a"), GpuRequest(exclusive=True), (1, 2)),
        (2, _cluster(one="bb", two="a", three="a"), GpuRequest(models=("a",)), (2, 1)),
        (5, _cluster(one="aaa", two="aaa"), GpuRequest(), None),
    ],
)
def test_list_available_shapes(gpus: int, cluster: Cluster, demand: GpuRequest, found: tuple[int, int] | None) -> None:
    """What is free on the fewest nodes, else what there can be on the fewest; never what cannot be."""
    if found is not None:
        assert node_layout.choose_layout(gpus, cluster, demand) == found
        return
    with pytest.raises(UsageError, match="--gpus 5: the cluster has 6 GPUs in total, but not 5 of them"):
        node_layout.choose_layout(gpus, cluster, demand)


def test_cordoned_nodes_and_failed_gpus_are_not_free() -> None:
    """Nor a card that failed."""
    nodes = (
        Node(name="one", gpus=(_gpu("one", state="free"), _gpu("one", state="failed")), state="up"),
        Node(name="two", gpus=(_gpu("two", state="free"),) * 2, state="draining"),
        Node(name="three", gpus=(_gpu("three", state="free"),), state="up"),
    )
    assert node_layout.choose_layout(2, Cluster(nodes=nodes), GpuRequest()) == (2, 1)
