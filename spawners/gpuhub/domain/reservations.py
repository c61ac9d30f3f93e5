"""Reservations: checks, and their values for the scheduler and the wire."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from gpuhub.broker_api import schemas
from gpuhub.broker_api.schemas import ReservationRequest
from gpuhub.common.errors import Conflict, InvalidRequest
from gpuhub.domain.models import ReservationRow, new_id
from gpuhub.nodes.inventory import Inventory
from gpuhub.scheduler.interface import Reservation


def build_reservation(request: ReservationRequest, *, by: str, inventory: Inventory, now: float) -> ReservationRow:
    """Build the row of a reservation.

    Raises:
        InvalidRequest: It reserves nothing, or for no user, or for no time; or it names unknown nodes or GPUs.
    """
    starts_at, ends_at = request.starts_at.timestamp(), request.ends_at.timestamp()
    if ends_at <= max(starts_at, now):
        raise InvalidRequest("ends_at: a reservation ends after it begins, and in the future")
    if not request.nodes and not request.gpus:
        raise InvalidRequest("nodes, gpus: name what should be kept")
    if not request.users and not request.groups:
        raise InvalidRequest("users, groups: name for whom it is kept")
    unknown = sorted(set(request.nodes) - set(inventory.nodes))
    if unknown:
        raise InvalidRequest(f"nodes: there is no node {unknown[0]!r}; there are: {', '.join(inventory.nodes)}")
    known_uuids = {gpu.uuid for node in inventory.nodes.values() for gpu in node.gpus}
    missing = sorted(set(request.gpus) - known_uuids)
    if missing:
        raise InvalidRequest(f"gpus: there is no GPU {missing[0]!r}")
    return ReservationRow(
        id=new_id("r"),
        name=request.name,
        nodes=tuple(dict.fromkeys(request.nodes)),
        gpus=tuple(dict.fromkeys(request.gpus)),
        users=tuple(dict.fromkeys(request.users)),
        groups=tuple(dict.fromkeys(request.groups)),
        starts_at=starts_at,
        ends_at=ends_at,
        created_by=by,
    )


def check_overlap(new: ReservationRow, others: Iterable[ReservationRow], inventory: Inventory) -> None:
    """Refuse a reservation of a GPU that another reservation keeps at the same time.

    Raises:
        Conflict: With the name of the other reservation.
    """
    uuids = find_uuids(new, inventory)
    for other in others:
        overlaps = new.starts_at < other.ends_at and other.starts_at < new.ends_at
        if overlaps and (uuids & find_uuids(other, inventory) or set(new.nodes) & set(other.nodes)):
            raise Conflict(f"the reservation {other.name!r} keeps some of these GPUs in that window")


def find_uuids(row: ReservationRow, inventory: Inventory) -> frozenset[str]:
    """Return all known GPUs of a reservation."""
    records = (inventory.nodes.get(node) for node in row.nodes)
    return frozenset(row.gpus) | {gpu.uuid for record in records if record is not None for gpu in record.gpus}


def build_scheduler_reservation(row: ReservationRow, inventory: Inventory) -> Reservation:
    """Return the reservation for the scheduler."""
    return Reservation(
        id=row.id,
        name=row.name,
        uuids=find_uuids(row, inventory),
        users=frozenset(row.users),
        groups=frozenset(row.groups),
        starts_at=row.starts_at,
        ends_at=row.ends_at,
    )


def build_reservation_view(row: ReservationRow) -> schemas.ReservationView:
    """Return the reservation for the wire."""
    return schemas.ReservationView(
        id=row.id,
        name=row.name,
        nodes=row.nodes,
        gpus=row.gpus,
        users=row.users,
        groups=row.groups,
        starts_at=datetime.fromtimestamp(row.starts_at, UTC),
        ends_at=datetime.fromtimestamp(row.ends_at, UTC),
        created_by=row.created_by,
    )


def find_reserved(reservations: Iterable[schemas.ReservationView], inventory: Inventory, now: float) -> dict[str, str]:
    """Return the name of the current reservation of each reserved GPU."""
    names: dict[str, str] = {}
    for reservation in reservations:
        if reservation.starts_at.timestamp() <= now < reservation.ends_at.timestamp():
            for node in reservation.nodes:
                record = inventory.nodes.get(node)
                names.update({gpu.uuid: reservation.name for gpu in (record.gpus if record is not None else ())})
            names.update(dict.fromkeys(reservation.gpus, reservation.name))
    return names
