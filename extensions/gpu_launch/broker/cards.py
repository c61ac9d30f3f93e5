"""The cluster's cards by their memory, for what must fit them."""

from __future__ import annotations

from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.broker.models import Cluster
from gpu_launch.prediction.memory_estimate import CardMemory


def list_accepted_cards(cluster: Cluster, demand: GpuRequest) -> list[CardMemory]:
    """Return all GPUs that a request allows, free or held, without those of guests."""
    return [
        CardMemory(name=f"{gpu.model} on {gpu.node}", memory_mib=gpu.memory_mib)
        for node in cluster.nodes
        if not node.guest
        for gpu in node.gpus
        if demand.accepts(gpu)
    ]
