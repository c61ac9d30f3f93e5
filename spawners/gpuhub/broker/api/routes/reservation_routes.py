"""HTTP routes of reservations."""

from __future__ import annotations

from fastapi import Response

from gpuhub.broker.api.dependencies import Admin, Caller, Cluster, ResourceId, create_router
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker_api.schemas import ReservationRequest, ReservationView

api = create_router("reservations")


@api.get("/reservations", responses=document_problems(422))
async def get_reservations(caller: Caller, cluster: Cluster) -> list[ReservationView]:
    """Return all reservations that have not ended."""
    return cluster.reservations()


@api.post("/reservations", status_code=201, responses=document_problems(409, 413, 422))
async def post_reservation(body: ReservationRequest, caller: Caller, admin: Admin) -> ReservationView:
    """Reserve GPUs for some users in a period. Administrators only."""
    return await admin.reserve(caller, body)


@api.delete(
    "/reservations/{reservation_id}",
    status_code=204,
    response_class=Response,
    responses=document_problems(404, 422),
)
async def delete_reservation(reservation_id: ResourceId, caller: Caller, admin: Admin) -> None:
    """Cancel a reservation. Administrators only."""
    await admin.cancel_reservation(caller, reservation_id)
