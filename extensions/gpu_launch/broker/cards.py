"""The cluster's cards by their memory, for what must fit them."""

from __future__ import annotations

from gpu_launch.broker.client import build_broker
from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.broker.models import Cluster
from gpu_launch.environment import Environment
from gpu_launch.errors import UsageError
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


def list_cards(env: Environment) -> list[CardMemory]:
    """Return all GPUs whose memory is known, free or held.

    Raises:
        UsageError: This server has no broker.
        BrokerError: It does not answer.
    """
    broker = build_broker(env)
    if broker is None:
        raise UsageError(
            'this server has no broker that knows the cards: give their sizes, such as cards=["24G", "12G"]'
        )
    return [
        CardMemory(name=f"{gpu.model} on {gpu.node}", memory_mib=gpu.memory_mib)
        for node in broker.get_cluster().nodes
        for gpu in node.gpus
        if gpu.memory_mib and gpu.state in ("", "free", "held")
    ]
