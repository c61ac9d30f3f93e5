"""The page of all GPUs: selects its nodes and renders its parts, which gpuhub_gpus.js refreshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gpuhub.broker_api.schemas import (
    ClusterView,
    GpuState,
    LeaseView,
    NodeState,
    NodeView,
    PendingReasonView,
    QueueEntry,
    UsageView,
)
from gpuhub.web import rendering
from gpuhub.web.text import count_totals, is_held_by_external_job

#: Nodes on one page, and number of nodes up to which the page has no filter.
NODES_PER_PAGE = 40
MAX_NODES_WITHOUT_FILTER = 8
#: Entries that are shown from the beginning of the queue; the user's own requests are always shown.
MAX_QUEUE_ENTRIES = 12

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusPageData:
    """Data of the page for one user; `view` is None while the broker does not answer."""

    name: str
    is_admin: bool
    view: ClusterView | None
    #: The user's leases that have not ended.
    leases: Sequence[LeaseView] = ()
    #: The user's usage; for an administrator all users' usage.
    usage: Sequence[UsageView] = ()
    #: For an administrator: quarantined leases, which only proof or an administrator can end.
    quarantined: Sequence[LeaseView] = ()


def parse_node_filter(arguments: Mapping[str, str]) -> NodeFilter:
    """Parse a query such as `show=mine&find=rig&page=2`; unknown values are ignored."""
    show, page = arguments.get("show", "all"), arguments.get("page", "1")
    return NodeFilter(
        show=next((kind for kind in get_args(NodeFilterKind) if kind == show), "all"),
        find=arguments.get("find", "").strip().casefold()[:64],
        page=int(page) if page.isdecimal() and len(page) < 6 else 1,
    )


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
    is_well = node.state is NodeState.UP and node.message is None
    return not is_well or any(
        gpu.state not in _HEALTHY_STATES and not is_held_by_external_job(gpu) for gpu in node.gpus
    )


def _searchable_texts(node: NodeView) -> list[str]:
    owners = [holder.owner for gpu in node.gpus for holder in gpu.holders]
    return [node.name, node.rack or "", node.switch or "", *(gpu.model for gpu in node.gpus), *owners]


def render_parts(data: GpusPageData, node_filter: NodeFilter) -> dict[str, str]:
    """Render the parts of the page, by their `data-gpuhub-part`."""
    macros = rendering.load_macros("gpuhub_gpus_parts.html")
    view = data.view
    if view is None:
        parts = dict.fromkeys(("totals", "own", "nodes", "queue", "partitions", "reservations", "admin"), "")
        return {**parts, "problem": str(macros.problem())}
    return {
        "problem": "",
        "totals": str(macros.totals(count_totals(view))),
        "own": str(macros.own(data, next((usage for usage in data.usage if usage.owner == data.name), None))),
        "nodes": str(macros.nodes(select_nodes(view.nodes, node_filter, data.name), data)),
        "queue": str(macros.queue(select_queue_entries(data, view), view.waiting, data)),
        "partitions": str(macros.partitions(view.partitions)),
        "reservations": str(macros.reservations(view.reservations, view.now)),
        "admin": str(macros.admin(data)) if data.is_admin else "",
    }


def select_queue_entries(data: GpusPageData, view: ClusterView) -> list[QueueEntry]:
    """Return the beginning of the queue and all of the user's own requests."""
    entries = [entry for entry in view.queue if entry.position <= MAX_QUEUE_ENTRIES or entry.owner == data.name]
    listed = {entry.lease for entry in entries}
    others = [lease for lease in data.leases if lease.position is not None and lease.id not in listed]
    return entries + [
        QueueEntry(
            lease=lease.id,
            position=lease.position or 0,
            owner=lease.owner,
            purpose=lease.purpose,
            wants=f"profile {lease.profile}" if lease.profile else "the GPUs of a job",
            since=lease.created_at,
            expected_start=lease.expected_start,
        )
        for lease in sorted(others, key=lambda lease: lease.position or 0)
    ]


def render_pending_reason(why: PendingReasonView) -> str:
    """Render the reasons why a request waits, which unfold below it."""
    return str(rendering.load_macros("gpuhub_gpus_parts.html").why(why))


def render_node_leases(leases: Sequence[LeaseView], node: str) -> str:
    """Render the leases on a node, which are shown before it is drained."""
    return str(rendering.load_macros("gpuhub_gpus_parts.html").runs(leases, node))
