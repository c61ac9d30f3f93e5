"""What administrators say about nodes and reservations, and looks at the cluster as a whole."""

from __future__ import annotations

from collections.abc import Mapping

from gpuhub.broker import audit, intake, leases, overview, views
from gpuhub.broker import reservations as reservation_rules
from gpuhub.broker.auth import Identity
from gpuhub.broker.cordons import Cordon, describe
from gpuhub.broker.core import Core
from gpuhub.broker.drafts import Draft
from gpuhub.broker.overview import Scene
from gpuhub.broker.rows import EventRow
from gpuhub.broker.schemas import (
    ClusterView,
    CordonRequest,
    Event,
    NodeView,
    Reservation,
    ReservationRequest,
    UsageView,
)
from gpuhub.broker.sharing import look_beside
from gpuhub.engines.base import Usage
from gpuhub.errors import NotAllowed, NotFound


def refuse_others(who: Identity, what: str) -> None:
    """Refuse whoever is no administrator.

    Raises:
        NotAllowed: naming what only administrators may do.
    """
    if not who.is_admin:
        raise NotAllowed(f"{who.name} is no administrator, and only administrators may {what}")


# -- nodes ------------------------------------------------------------------------------------------------------------


async def cordon(core: Core, who: Identity, node: str, request: CordonRequest, *, is_drain: bool) -> NodeView:
    """Let a node take no new work; a drain also ends what runs there after the grace.

    Raises:
        NotAllowed, NotFound.
    """
    refuse_others(who, "cordon nodes")
    _refuse_unknown(core, node)
    row = Cordon(
        node=node,
        state="draining" if is_drain else "cordoned",
        by=who.name,
        reason=request.reason,
        at=core.clock.now(),
        grace_s=request.grace_s if is_drain else 0,
    )
    await core.cordon(node, row)
    core.note_event(f"node.{row.state}", f"node {node} is {describe(row)}", node=node)
    if is_drain:
        await core.ledger.change(lambda draft: _cut_short(draft, row))
    return view_node(core, node)


async def undrain(core: Core, who: Identity, node: str) -> NodeView:
    """Let a node take work again; leases there that were to end for a drain get their time back.

    Raises:
        NotAllowed, NotFound.
    """
    refuse_others(who, "cordon nodes")
    _refuse_unknown(core, node)
    before = core.cordons.get(node)
    await core.cordon(node, None)
    if before is not None:
        core.note_event("node.uncordoned", f"node {node} takes work again, says {who.name}", node=node)
        await core.ledger.change(lambda draft: _restore_times(draft, node, core.cordons))
    return view_node(core, node)


def _refuse_unknown(core: Core, node: str) -> None:
    if node not in core.inventory.nodes:
        raise NotFound(f"there is no node {node!r}; there are: {', '.join(core.inventory.nodes)}")


def _cut_short(draft: Draft, row: Cordon) -> None:
    for lease_id in sorted(draft.index.find("node", row.node)):
        lease = draft.leases[lease_id]
        draft.put_lease(leases.cut_short(lease, draft.now + row.grace_s, f"node {row.node} is {describe(row)}"))


def _restore_times(draft: Draft, node: str, others: Mapping[str, Cordon]) -> None:
    for lease_id in sorted(draft.index.find("node", node)):
        lease = draft.leases[lease_id]
        if not any(name in others and others[name].is_draining for name in lease.nodes):
            draft.put_lease(leases.restore_time(lease))


# -- reservations -----------------------------------------------------------------------------------------------------


async def reserve(core: Core, who: Identity, request: ReservationRequest) -> Reservation:
    """Keep GPUs for some users in a window.

    Raises:
        NotAllowed, InvalidRequest, Conflict.
    """
    refuse_others(who, "reserve GPUs")
    row = reservation_rules.build(request, by=who.name, inventory=core.inventory, now=core.clock.now())
    reservation_rules.refuse_overlap(row, core.reservations, core.inventory)
    await core.add_reservation(row)
    core.note_event("reservation.made", f"reservation {row.name!r} was made by {who.name}")
    return reservation_rules.for_wire(row)


async def cancel_reservation(core: Core, who: Identity, reservation_id: str) -> None:
    """Keep them no longer.

    Raises:
        NotAllowed, NotFound.
    """
    refuse_others(who, "cancel reservations")
    row = next((one for one in core.reservations if one.id == reservation_id), None)
    if row is None:
        raise NotFound(f"there is no reservation {reservation_id!r}")
    await core.drop_reservation(reservation_id)
    core.note_event("reservation.cancelled", f"reservation {row.name!r} was cancelled by {who.name}")


# -- looks ------------------------------------------------------------------------------------------------------------


def view_cluster(core: Core, who: Identity | None) -> ClusterView:
    """Everything as everybody sees it."""
    return overview.build_cluster(_scene(core, who))


def view_node(core: Core, node: str) -> NodeView:
    """One node as everybody sees it."""
    return overview.build_one_node(_scene(core, None), node)


def _scene(core: Core, who: Identity | None) -> Scene:
    return Scene(
        cluster=core.cluster,
        leases=core.ledger.snapshot.leases,
        places=core.places(),
        inventory=core.inventory,
        cordons=core.cordons,
        guards=core.guards.by_uuid,
        job_names={job.lease_id: job.name for job in core.ledger.snapshot.jobs.values() if job.name},
        reservations=[reservation_rules.for_wire(row) for row in core.reservations],
        engine=core.engine,
        beside=look_beside(core.engine, core.clock.now()),
        now=core.clock.now(),
        monotonic=core.clock.monotonic(),
        owner="" if who is None or not who.is_user else who.name,
        groups=frozenset() if who is None else who.groups,
    )


def view_usage(core: Core, who: Identity, owner: str | None) -> list[UsageView]:
    """What owners have, had and may have.

    Raises:
        NotAllowed: somebody else's, asked for by somebody who is no administrator.
    """
    if owner is not None:
        audit.note_owner(owner)
    if not who.sees_all and owner not in {None, who.name}:
        raise NotAllowed(f"{who.name} may not see what {owner} uses")
    usage = core.usage()
    if owner is not None or not who.sees_all:
        wanted = [owner or who.name]
    else:
        wanted = sorted(usage.keys() | {lease.owner for lease in core.ledger.snapshot.leases.values()})
    index, jobs = core.ledger.index, core.ledger.snapshot.jobs
    return [
        views.build_usage(
            name,
            usage.get(name, Usage()),
            intake.count_requests(index, jobs, "waiting of", name),
            core.rights(name).each,
        )
        for name in wanted
    ]


def view_event(row: EventRow) -> Event:
    """An event as it goes over the wire."""
    return Event(
        seq=row.seq,
        at=views.as_time(row.at),
        kind=row.kind,
        text=row.text,
        owner=row.owner,
        lease=row.lease,
        job=row.job,
        node=row.node,
    )
