"""Whether a request can ever be granted with what there is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpuhub import gpus
from gpuhub.engines.base import NodeSupply, Request
from gpuhub.gpus import Card


def infeasible(
    request: Request, cards: Mapping[str, Sequence[Card] | None], nodes: Mapping[str, NodeSupply]
) -> str | None:
    """Why the request can never be granted, for a person; None when it can, or may.

    `cards` has every node of the cluster, None for one not known yet; `nodes` those of which more is known.
    """
    there_is = "there is: " + gpus.describe_nodes({node: on_node or () for node, on_node in cards.items()})
    unknown = sorted(request.exclude - set(cards))
    if unknown:
        return f"no node {unknown[0]!r} to leave out; {there_is}"
    usable = {node: on_node for node, on_node in cards.items() if node not in request.exclude}
    beside = f" besides {', '.join(sorted(request.exclude))}" if request.exclude else ""
    needed = 1 if request.spread is not None else request.least_nodes
    if len(usable) < needed:
        return f"{needed} nodes were asked for and the cluster has {len(usable)}{beside}: {', '.join(usable) or 'none'}"
    large = [node for node in usable if _has_means(request, nodes.get(node))]
    if len(large) < needed:
        return f"{_means(request)} was asked for, which {len(large) or 'no'} of the nodes{beside} can give"
    if any(_suffices(request, usable, large, model) for model in _models(request, usable)):
        return None
    if request.spread is not None:
        there = max(_count(request, usable, large, model) for model in _models(request, usable))
        return f"{describe(request)} was asked for, and the nodes{beside} have {there or 'none'} such; {there_is}"
    able = [node for node in large if any(_enough(request, usable[node], model) for model in _models(request, usable))]
    of_one_model = " of one model" if request.same_model and len(able) >= needed else ""
    can = "too few" if of_one_model else len(able) or "no"
    return f"{describe(request)} was asked for, which {can} of the nodes{beside} can give{of_one_model}; {there_is}"


def describe(request: Request) -> str:
    """What a request asks for, for a person: `1 × RTX 5090 on each of 3 nodes`."""
    if request.spread is not None:
        return f"{gpus.describe(request.spread, request.requirement)} on any nodes"
    if request.share > 1:
        asked = f"1/{request.share} of {gpus.describe(1, request.requirement)}"
    elif request.gpus_per_node:
        asked = gpus.describe(request.gpus_per_node, request.requirement)
    else:
        asked = "a place without GPU"
    if request.nodes == 1:
        return f"{asked} on one node"
    if request.least_nodes < request.nodes:
        return f"{asked} on each of {request.least_nodes} to {request.nodes} nodes"
    return f"{asked} on each of {request.nodes} nodes"


def _models(request: Request, usable: Mapping[str, Sequence[Card] | None]) -> list[str | None]:
    """The models to look at one by one, or None for all at once."""
    if not request.same_model or not request.size:
        return [None]
    return [*dict.fromkeys(card.model for on_node in usable.values() for card in on_node or ()), None][
        : -1 if any(usable.values()) else None
    ]


def _has_means(request: Request, node: NodeSupply | None) -> bool:
    """Whether the node's CPU, memory and driver would do, where they are known."""
    if node is None:
        return True
    if node.driver is not None and not request.requirement.accepts_driver(node.driver):
        return False
    if node.cpu_milli is not None and node.cpu_milli < request.cpu_milli:
        return False
    return node.memory_mib is None or node.memory_mib >= request.memory_mib


def _means(request: Request) -> str:
    driver = request.requirement.least_driver
    parts = [f"{request.cpu_milli / 1000:.3g} CPU cores"] if request.cpu_milli else []
    parts += [f"{request.memory_mib / 1024:.3g} GiB of memory"] if request.memory_mib else []
    parts += [f"driver {driver} or newer"] if driver else []
    return " with ".join([", ".join(parts[:2]), *parts[2:]]) if len(parts) > 2 else " and ".join(parts)


def _suffices(
    request: Request, usable: Mapping[str, Sequence[Card] | None], large: Iterable[str], model: str | None
) -> bool:
    able = [node for node in large if usable[node] is None or _enough(request, usable[node], model)]
    if request.spread is None:
        return len(able) >= request.least_nodes
    return any(usable[node] is None for node in able) or _count(request, usable, large, model) >= request.spread


def _enough(request: Request, cards: Iterable[Card] | None, model: str | None) -> bool:
    needed = min(1, request.spread) if request.spread is not None else request.gpus_per_node
    return cards is not None and _fitting(request, cards, model) >= needed


def _count(
    request: Request, usable: Mapping[str, Sequence[Card] | None], large: Iterable[str], model: str | None
) -> int:
    return sum(_fitting(request, usable[node] or (), model) for node in large)


def _fitting(request: Request, cards: Iterable[Card], model: str | None) -> int:
    return sum(model in (None, card.model) and request.requirement.accepts(card) for card in cards)
