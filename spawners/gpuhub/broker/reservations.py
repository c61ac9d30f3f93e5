"""GPUs kept for some users in a window: checked, and as the engine has them. Pure; times are seconds since 1970."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from gpuhub.broker import schemas
from gpuhub.broker.rows import ReservationRow, new_id
from gpuhub.broker.schemas import ReservationRequest
from gpuhub.engines.base import Reservation
from gpuhub.errors import Conflict, InvalidRequest
from gpuhub.nodes.inventory import Inventory


def build(request: ReservationRequest, *, by: str, inventory: Inventory, now: float) -> ReservationRow:
    """A reservation as it is stored.

    Raises:
        InvalidRequest: it keeps nothing, or for nobody, or at no time; or it names what is not there.
    """
    starts_at, ends_at = request.starts_at.timestamp(), request.ends_at.timestamp()
    if ends_at <= max(starts_at, now):
        raise InvalidRequest("ends_at: a reservation ends after it begins, and in the future")
    if not request.nodes and not request.gpus:
        raise InvalidRequest("nodes, gpus: name what is to be kept")
    if not request.users and not request.groups:
        raise InvalidRequest("users, groups: name for whom it is kept")
    unknown = sorted(set(request.nodes) - set(inventory.nodes))
    if unknown:
        raise InvalidRequest(f"nodes: there is no node {unknown[0]!r}; there are: {', '.join(inventory.nodes)}")
    known = {gpu.uuid for node in inventory.nodes.values() for gpu in node.gpus}
    missing = sorted(set(request.gpus) - known)
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


def refuse_overlap(new: ReservationRow, others: Iterable[ReservationRow], inventory: Inventory) -> None:
    """Refuse a reservation of a GPU that another one keeps at some of the same time.

    Raises:
        Conflict: naming the other one.
    """
    mine = find_uuids(new, inventory)
    for other in others:
        meets = new.starts_at < other.ends_at and other.starts_at < new.ends_at
        if meets and (mine & find_uuids(other, inventory) or set(new.nodes) & set(other.nodes)):
            raise Conflict(f"the reservation {other.name!r} keeps some of these GPUs in that window")


def find_uuids(row: ReservationRow, inventory: Inventory) -> frozenset[str]:
    """All GPUs that a reservation keeps, as far as they are known."""
    records = (inventory.nodes.get(node) for node in row.nodes)
    return frozenset(row.gpus) | {gpu.uuid for record in records if record is not None for gpu in record.gpus}


def for_engine(row: ReservationRow, inventory: Inventory) -> Reservation:
    """A reservation as the engine sees it."""
    return Reservation(
        id=row.id,
        name=row.name,
        uuids=find_uuids(row, inventory),
        users=frozenset(row.users),
        groups=frozenset(row.groups),
        starts_at=row.starts_at,
        ends_at=row.ends_at,
    )


def for_wire(row: ReservationRow) -> schemas.Reservation:
    """A reservation as everybody sees it."""
    return schemas.Reservation(
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


def find_kept(reservations: Iterable[schemas.Reservation], inventory: Inventory, now: float) -> dict[str, str]:
    """By GPU the name of the reservation that keeps it at present."""
    found: dict[str, str] = {}
    for one in reservations:
        if one.starts_at.timestamp() <= now < one.ends_at.timestamp():
            for node in one.nodes:
                record = inventory.nodes.get(node)
                found.update({gpu.uuid: one.name for gpu in (record.gpus if record is not None else ())})
            found.update(dict.fromkeys(one.gpus, one.name))
    return found
