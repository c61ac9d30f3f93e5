"""What `gpuhub up` refuses once the nodes' GPUs have been read."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gpuhub.broker.schemas import ClusterView, GpuState, GpuView, NodeState, NodeView
from gpuhub.errors import SettingsError
from gpuhub.head.feasibility import refuse_doubled


def node(name: str, *uuids: str) -> NodeView:
    """A node with these GPUs."""
    gpus = tuple(
        GpuView(
            uuid=uuid, node=name, index=index, model="RTX 5090", memory_mib=32607, state=GpuState.FREE, holder=None,
            utilisation_percent=None, memory_used_mib=None,
        )
        for index, uuid in enumerate(uuids)
    )  # fmt: skip
    return NodeView(name=name, state=NodeState.UP, message=None, gpus=gpus)


def view(*nodes: NodeView) -> ClusterView:
    """A cluster of them."""
    return ClusterView(nodes=nodes, profiles=(), queue=(), now=datetime.now(UTC))


def test_one_machine_that_stands_twice_in_the_settings_is_refused() -> None:
    """By another address and another Docker URL it looks like two; its GPUs tell, and both names are said."""
    with pytest.raises(SettingsError, match="nodes rig1 and rig3 report the same GPU GPU-a") as refused:
        refuse_doubled(view(node("rig1", "GPU-a"), node("rig2", "GPU-b"), node("rig3", "GPU-c", "GPU-a")))
    assert "GPU-b" not in str(refused.value)


def test_nodes_with_gpus_of_their_own_are_fine() -> None:
    """No GPU is reported twice."""
    nodes = view(node("rig1", "GPU-a"), node("rig2", "GPU-b", "GPU-c"))
    refuse_doubled(nodes)
    assert len(nodes.nodes) == 2
