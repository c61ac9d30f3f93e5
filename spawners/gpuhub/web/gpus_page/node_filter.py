"""Which nodes the page shows: the filter of its query, and one page of those that match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tornado import web

from gpuhub.broker_api.schemas import GpuState, NodeState, NodeView
from gpuhub.web.text import SLEEPING, is_held_by_external_job

#: Nodes on one page, and number of nodes up to which the page has no filter.
NODES_PER_PAGE = 40
MAX_NODES_WITHOUT_FILTER = 8
NodeFilterKind = Literal["all", "free", "mine", "trouble"]
_HEALTHY_STATES = (GpuState.FREE, GpuState.HELD)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFilter:
    """The filter of the nodes, from the page's query."""

    show: NodeFilterKind = "all"
    #: Part of the name of a node, model or holder.
    find: str = ""
    page: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePage:
    """One page of the nodes that match the filter."""

    nodes: Sequence[NodeView]
    fitting: int
    page: int
    pages: int


def parse_node_filter(arguments: Mapping[str, str]) -> NodeFilter:
    """Parse a query such as `show=mine&find=rig&page=2`; unknown values are ignored."""
    show, page = arguments.get("show", "all"), arguments.get("page", "1")
    return NodeFilter(
        show=next((kind for kind in get_args(NodeFilterKind) if kind == show), "all"),
        find=arguments.get("find", "").strip().casefold()[:64],
        page=int(page) if page.isdecimal() and len(page) < 6 else 1,
    )


def read_node_filter(handler: web.RequestHandler) -> NodeFilter:
    """Return the filter of a request's query."""
    return parse_node_filter({name: handler.get_query_argument(name) for name in handler.request.query_arguments})


def select_nodes(nodes: Sequence[NodeView], node_filter: NodeFilter, name: str) -> NodePage:
    """Return one page of the nodes that match the filter; `name` is the user's."""
    fitting = [node for node in nodes if _matches(node, node_filter, name)]
    pages = max(1, -(-len(fitting) // NODES_PER_PAGE))
    page = min(max(node_filter.page, 1), pages)
    shown = fitting[(page - 1) * NODES_PER_PAGE : page * NODES_PER_PAGE]
    return NodePage(nodes=shown, fitting=len(fitting), page=page, pages=pages)


def _matches(node: NodeView, node_filter: NodeFilter, name: str) -> bool:
    if node_filter.show == "free" and not any(gpu.state is GpuState.FREE for gpu in node.gpus):
        return False
    if node_filter.show == "mine" and not any(holder.owner == name for gpu in node.gpus for holder in gpu.holders):
        return False
    if node_filter.show == "trouble" and not needs_attention(node):
        return False
    return not node_filter.find or any(node_filter.find in text.casefold() for text in _searchable_texts(node))


def needs_attention(node: NodeView) -> bool:
    """Return whether an administrator should check the node."""
    if node.state in SLEEPING:
        return False
    is_well = node.state is NodeState.UP and node.message is None
    return not is_well or any(
        gpu.state not in _HEALTHY_STATES and not is_held_by_external_job(gpu) for gpu in node.gpus
    )


def _searchable_texts(node: NodeView) -> list[str]:
    owners = [holder.owner for gpu in node.gpus for holder in gpu.holders]
    return [node.name, node.rack or "", node.switch or "", *(gpu.model for gpu in node.gpus), *owners]
