"""Sentences about leases and nodes for a person who waits: pure."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence

from gpuhub.broker.schemas import ClusterView, Gpu, Lease, NodeState
from gpuhub.gpus import Card
from gpuhub.settings import Profile, gpu_requirement


def describe_waiting(lease: Lease | None) -> tuple[str, str]:
    """The text for a waiting lease, and HTML for a button that leaves the queue; None: the broker is silent."""
    if lease is None:
        return "The queue does not answer at present; your place in it is kept.", ""
    text = f"Waiting for a GPU: position {lease.position}." if lease.position else "Waiting for a GPU."
    if lease.waiting_for:
        text += f" {lease.waiting_for}"
    button = (
        ' <button type="button" class="btn btn-sm btn-outline-secondary gpuhub-leave" '
        f'data-lease="{html.escape(lease.id)}">Leave the queue</button>'
    )
    return text, button


def describe_placing(lease: Lease) -> str:
    """Such as `Placed on rig1: RTX 5090`."""
    return f"Placed on {lease.nodes[0]}: {describe_gpus(lease.gpus)}"


def describe_gpus(gpus: Sequence[Gpu]) -> str:
    """Such as `2 × RTX 5090`, or `no GPU`."""
    counted = Counter(gpu.model for gpu in gpus)
    parts = [model if count == 1 else f"{count} × {model}" for model, count in counted.items()]
    return ", ".join(parts) or "no GPU"


def eligible_nodes(view: ClusterView, profile: Profile) -> list[str]:
    """The nodes that answer and could ever serve the profile: where its image has to be."""
    requirement = gpu_requirement(profile)
    return [
        node.name
        for node in view.nodes
        if node.state is NodeState.UP
        and sum(requirement.accepts(Card(model=gpu.model, memory_mib=gpu.memory_mib)) for gpu in node.gpus)
        >= profile.gpu_count
    ]
