"""The page of all GPUs: which nodes it shows, and its parts as HTML. Pure; refreshed by gpuhub_gpus.js."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gpuhub.broker.schemas import ClusterView, GpuState, Lease, NodeState, NodeView, QueueEntry, UsageView, Why
from gpuhub.containers import rendering
from gpuhub.containers.telling import count_totals, is_held_beside

#: So many nodes at once; of fewer than a handful, nothing needs to be looked for.
NODES_A_PAGE = 40
FEW_NODES = 8
#: Of a long queue, so many from its beginning; one's own requests are shown wherever they stand.
QUEUE_SHOWN = 12

Show = Literal["all", "free", "mine", "trouble"]
_FINE = (GpuState.FREE, GpuState.HELD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Which nodes somebody wants to see."""

    show: Show = "all"
    #: A part of a node's name, of a model's, or of a holder's.
    find: str = ""
    page: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The nodes that are shown, of all that fit."""

    nodes: Sequence[NodeView]
    fitting: int
    page: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What somebody sees. A view of None: the broker is silent."""

    name: str
    is_admin: bool
    view: ClusterView | None
    #: Their own leases that have not ended.
    leases: Sequence[Lease] = ()
    #: Their own usage; for an administrator everybody's.
    usage: Sequence[UsageView] = ()
    #: For an administrator: leases that only proof, or they, can end.
    quarantined: Sequence[Lease] = ()


def parse_wish(arguments: Mapping[str, str]) -> Wish:
    """The wish in a query such as `show=mine&find=rig&page=2`; what it does not know is left aside."""
    show, page = arguments.get("show", "all"), arguments.get("page", "1")
    return Wish(
        show=next((known for known in get_args(Show) if known == show), "all"),
        find=arguments.get("find", "").strip().casefold()[:64],
        page=int(page) if page.isdecimal() and len(page) < 6 else 1,
    )


def choose_nodes(nodes: Sequence[NodeView], wish: Wish, name: str) -> Chosen:
    """One page of the nodes that fit."""
    fitting = [node for node in nodes if _fits(node, wish, name)]
    pages = max(1, -(-len(fitting) // NODES_A_PAGE))
    page = min(max(wish.page, 1), pages)
    shown = fitting[(page - 1) * NODES_A_PAGE : page * NODES_A_PAGE]
    return Chosen(nodes=shown, fitting=len(fitting), page=page, pages=pages)


def _fits(node: NodeView, wish: Wish, name: str) -> bool:
    if wish.show == "free" and not any(gpu.state is GpuState.FREE for gpu in node.gpus):
        return False
    if wish.show == "mine" and not any(holder.owner == name for gpu in node.gpus for holder in gpu.holders):
        return False
    if wish.show == "trouble" and not has_trouble(node):
        return False
    return not wish.find or any(wish.find in text.casefold() for text in _texts(node))


def has_trouble(node: NodeView) -> bool:
    """Whether an administrator should look at it."""
    is_well = node.state is NodeState.UP and node.message is None
    return not is_well or any(gpu.state not in _FINE and not is_held_beside(gpu) for gpu in node.gpus)


def _texts(node: NodeView) -> list[str]:
    owners = [holder.owner for gpu in node.gpus for holder in gpu.holders]
    return [node.name, node.rack or "", node.switch or "", *(gpu.model for gpu in node.gpus), *owners]


def build_parts(look: Look, wish: Wish) -> dict[str, str]:
    """The parts of the page, by their `data-gpuhub-part`."""
    macros = rendering.macros("gpuhub_gpus_parts.html")
    view = look.view
    if view is None:
        parts = dict.fromkeys(("totals", "own", "nodes", "queue", "partitions", "reservations", "admin"), "")
        return {**parts, "problem": str(macros.problem())}
    return {
        "problem": "",
        "totals": str(macros.totals(count_totals(view))),
        "own": str(macros.own(look, next((one for one in look.usage if one.owner == look.name), None))),
        "nodes": str(macros.nodes(choose_nodes(view.nodes, wish, look.name), look)),
        "queue": str(macros.queue(choose_entries(look, view), view.waiting, look)),
        "partitions": str(macros.partitions(view.partitions)),
        "reservations": str(macros.reservations(view.reservations, view.now)),
        "admin": str(macros.admin(look)) if look.is_admin else "",
    }


def choose_entries(look: Look, view: ClusterView) -> list[QueueEntry]:
    """The beginning of the queue and one's own requests, wherever they stand."""
    told = [entry for entry in view.queue if entry.position <= QUEUE_SHOWN or entry.owner == look.name]
    known = {entry.lease for entry in told}
    far = [lease for lease in look.leases if lease.position is not None and lease.id not in known]
    return told + [
        QueueEntry(
            lease=lease.id,
            position=lease.position or 0,
            owner=lease.owner,
            purpose=lease.purpose,
            wants=f"profile {lease.profile}" if lease.profile else "the GPUs of a job",
            since=lease.created_at,
            expected_start=lease.expected_start,
        )
        for lease in sorted(far, key=lambda lease: lease.position or 0)
    ]


def build_why(why: Why) -> str:
    """What unfolds below a request of the queue."""
    return str(rendering.macros("gpuhub_gpus_parts.html").why(why))


def build_runs(leases: Sequence[Lease], node: str) -> str:
    """What runs on a node: shown before it is drained."""
    return str(rendering.macros("gpuhub_gpus_parts.html").runs(leases, node))
