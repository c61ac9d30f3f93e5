"""The HTML of the page's parts for one viewer, from the state of the cluster and the viewer's own.

What many viewers see alike is rendered once for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from gpuhub.broker_api.schemas import (
    ClusterView,
    LeaseState,
    LeaseView,
    OutputShareView,
    PendingReasonView,
    Purpose,
    QueueEntry,
    UsageView,
)
from gpuhub.broker_api.schemas.limits import COUNTED_BY_SCHEDULER
from gpuhub.broker_api.schemas.live import JobSummaryView, OwnView
from gpuhub.web.gpus_page.node_filter import NodeFilter, NodePage, select_nodes
from gpuhub.web.template_loader import load_macros
from gpuhub.web.text import count_totals

#: Entries that are shown from the beginning of the queue; the user's own requests are always shown.
MAX_QUEUE_ENTRIES = 12
#: Maximum number of filters whose nodes are kept rendered.
MAX_FILTERS = 64
PARTS = (
    "problem", "totals", "own", "jobs", "shares", "queue", "partitions", "reservations", "quarantined", "all_usage",
    "pages",
)  # fmt: skip
_TEMPLATE = "gpuhub_gpus_parts.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusPageData:
    """Data of the page for one user; `view` is None while the broker does not answer."""

    name: str
    is_admin: bool
    view: ClusterView | None
    #: The user's leases that have not ended, and the number of further ones.
    leases: Sequence[LeaseView] = ()
    more_leases: int = 0
    #: The user's jobs, and the number of further ones that have not ended.
    jobs: Sequence[JobSummaryView] = ()
    more_jobs: int = 0
    #: Output shares of and with the user, and the number of further ones.
    shares: Sequence[OutputShareView] = ()
    more_shares: int = 0
    #: The user's usage; for an administrator also all other users' usage.
    usage: Sequence[UsageView] = ()
    #: For an administrator: quarantined leases, which only proof or an administrator can end.
    quarantined: Sequence[LeaseView] = ()

    @classmethod
    def build(cls, user: Any, view: ClusterView | None, own: OwnView | None) -> Self:
        """Return the data for the hub's `user`; without the user's own view nothing is shown as if it were true."""
        if view is None or own is None:
            return cls(name=user.name, is_admin=user.admin, view=None)
        others = [usage for usage in own.all_usage if usage.owner != user.name] if user.admin else []
        return cls(
            name=user.name,
            is_admin=user.admin,
            view=view,
            leases=own.leases,
            more_leases=own.more_leases,
            jobs=own.jobs,
            more_jobs=own.more_jobs,
            shares=own.shares,
            more_shares=own.more_shares,
            usage=[*([own.usage] if own.usage else []), *others],
            quarantined=own.quarantined if user.admin else (),
        )

    @property
    def own_usage(self) -> UsageView | None:
        """The user's own usage."""
        return next((usage for usage in self.usage if usage.owner == self.name), None)

    @property
    def held(self) -> list[LeaseView]:
        """The user's leases that do not wait, without those of the jobs that are listed."""
        of_jobs = {job.lease for job in self.jobs}
        return [lease for lease in self.leases if lease.state is not LeaseState.REQUESTED and lease.id not in of_jobs]

    def describe_limits(self, usage: UsageView) -> str:
        """Return as JSON, for each limit that gpuhub itself enforces, the user's own value and the one in force."""
        own = usage.own_limits
        in_force = {
            "max_gpus": usage.max_gpus,
            "gpu_hours_per_week": usage.max_gpu_hours_week,
            "max_waiting": usage.max_waiting,
            "max_jobs": usage.max_jobs,
            "longest_lease_s": usage.longest_lease_s,
        }
        elsewhere = self.view is not None and self.view.capabilities.external_jobs
        return json.dumps(
            {
                name: [None if own is None else getattr(own, name), value]
                for name, value in in_force.items()
                if not (elsewhere and name in COUNTED_BY_SCHEDULER)
            }
        )

    def find_lease(self, job: JobSummaryView) -> LeaseView | None:
        """Return the lease of a job, if it is among the user's."""
        return next((lease for lease in self.leases if lease.id == job.lease), None)

    def is_suspended(self, lease_id: str) -> bool:
        """Return whether a lease of the user's waits for the GPU that it was suspended on."""
        return any(lease.id == lease_id and lease.suspension is not None for lease in self.leases)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPage:
    """The HTML of the page by part, and of its nodes by name, in their order."""

    parts: Mapping[str, str]
    nodes: Mapping[str, str]


@dataclass(slots=True)
class RenderedCluster:
    """One state of the cluster, with the HTML that several viewers share."""

    view: ClusterView
    _shared: dict[str, str] = field(default_factory=dict)
    _nodes: dict[tuple[NodeFilter, str, bool], tuple[NodePage, dict[str, str]]] = field(default_factory=dict)

    def render_shared(self) -> dict[str, str]:
        """Return the parts that are the same for all viewers."""
        if not self._shared:
            macros, view = load_macros(_TEMPLATE), self.view
            self._shared = {
                "totals": str(macros.totals(count_totals(view))),
                "partitions": str(macros.partitions(view.partitions)),
                "reservations": str(macros.reservations(view.reservations, view.now)),
            }
        return self._shared

    def render_nodes(self, node_filter: NodeFilter, name: str, *, is_admin: bool) -> tuple[NodePage, dict[str, str]]:
        """Return the nodes that match a viewer's filter, and their HTML by name."""
        # Only one kind of filter depends on the viewer.
        key = (node_filter, name if node_filter.show == "mine" else "", is_admin)
        if key not in self._nodes:
            macros, page = load_macros(_TEMPLATE), select_nodes(self.view.nodes, node_filter, name)
            while len(self._nodes) >= MAX_FILTERS:
                del self._nodes[next(iter(self._nodes))]
            self._nodes[key] = (
                page,
                {node.name: str(macros.node(node, self.view.capabilities, is_admin)) for node in page.nodes},
            )
        return self._nodes[key]


def render_page(data: GpusPageData, node_filter: NodeFilter, cluster: RenderedCluster | None = None) -> RenderedPage:
    """Render the page for one viewer; `cluster` is the rendered state of `data`, where it is shared with others."""
    macros, view = load_macros(_TEMPLATE), data.view
    if view is None:
        return RenderedPage(parts={**dict.fromkeys(PARTS, ""), "problem": str(macros.problem())}, nodes={})
    cluster = cluster or RenderedCluster(view)
    page, nodes = cluster.render_nodes(node_filter, data.name, is_admin=data.is_admin)
    parts = {
        "problem": "",
        **cluster.render_shared(),
        "own": str(macros.own(data, data.own_usage)),
        "jobs": str(macros.jobs(data)),
        "shares": str(macros.shares(data)),
        "queue": str(macros.queue(select_queue_entries(data, view), view.waiting, data)),
        "quarantined": str(macros.quarantined(data)) if data.is_admin else "",
        "all_usage": str(macros.all_usage(data)) if data.is_admin else "",
        "pages": str(macros.pages(page)),
    }
    return RenderedPage(parts=parts, nodes=nodes)


def select_queue_entries(data: GpusPageData, view: ClusterView) -> list[QueueEntry]:
    """Return the beginning of the queue and all of the user's own requests that are listed."""
    own = {lease.id for lease in data.leases}
    entries = [entry for entry in view.queue if entry.position <= MAX_QUEUE_ENTRIES or entry.lease in own]
    listed = {entry.lease for entry in entries}
    others = [lease for lease in data.leases if lease.position is not None and lease.id not in listed]
    return entries + [
        QueueEntry(
            lease=lease.id,
            position=lease.position or 0,
            owner=lease.owner,
            purpose=lease.purpose,
            wants=f"profile {lease.profile}" if lease.purpose is Purpose.NOTEBOOK else "the GPUs of a job",
            since=lease.created_at,
            expected_start=lease.expected_start,
        )
        for lease in sorted(others, key=lambda lease: lease.position or 0)
    ]


def render_pending_reason(why: PendingReasonView) -> str:
    """Render the reasons why a request waits, which unfold below it."""
    return str(load_macros(_TEMPLATE).why(why))


def render_node_leases(leases: Sequence[LeaseView], node: str) -> str:
    """Render the leases on a node, with the administrator's buttons."""
    return str(load_macros(_TEMPLATE).runs(leases, node))
