"""HTTP routes of notifications and of users' destinations."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Query, Request, Response

from gpuhub.broker.api.dependencies import After, Caller, ResourceId, create_router
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.operations.notifications import NotificationOperations
from gpuhub.broker_api.schemas import DestinationChange, DestinationRequest, DestinationView, NotificationView

#: Notifications in one answer.
MAX_NOTIFICATIONS = 100


async def get_notification_operations(request: Request) -> NotificationOperations:
    """Return the app's operations on notifications."""
    return cast("NotificationOperations", request.app.state.notifications)


Operations = Annotated[NotificationOperations, Depends(get_notification_operations)]
Limit = Annotated[int, Query(ge=1, le=MAX_NOTIFICATIONS, description="Maximum number of notifications")]

api = create_router("notifications")


@api.get("/notifications", responses=document_problems(422))
async def get_notifications(
    caller: Caller, operations: Operations, after: After = None, limit: Limit = 20
) -> list[NotificationView]:
    """Return the caller's notifications, oldest first: the newest ones, or the first ones after `after`."""
    return await operations.list_notifications(caller, after, limit)


@api.get("/destinations", responses=document_problems(422))
async def get_destinations(caller: Caller, operations: Operations) -> list[DestinationView]:
    """Return where the caller has notifications sent, without the addresses themselves."""
    return await operations.list_destinations(caller)


@api.post("/destinations", status_code=201, responses=document_problems(409, 413, 422, 429))
async def post_destination(body: DestinationRequest, caller: Caller, operations: Operations) -> DestinationView:
    """Add a destination for the caller."""
    return await operations.add_destination(caller, body)


@api.put("/destinations/{destination_id}", responses=document_problems(404, 413, 422))
async def put_destination(
    destination_id: ResourceId, body: DestinationChange, caller: Caller, operations: Operations
) -> DestinationView:
    """Choose other notifications for a destination."""
    return await operations.change_destination(caller, destination_id, body)


@api.delete(
    "/destinations/{destination_id}", status_code=204, response_class=Response, responses=document_problems(404, 422)
)
async def delete_destination(destination_id: ResourceId, caller: Caller, operations: Operations) -> None:
    """Remove a destination, with what waits to be sent there."""
    await operations.delete_destination(caller, destination_id)


@api.post("/destinations/{destination_id}/test", status_code=202, responses=document_problems(404, 422, 429))
async def post_test(destination_id: ResourceId, caller: Caller, operations: Operations) -> DestinationView:
    """Queue a test message; `sent_at` or `failed_at` of the destination show what became of it."""
    return await operations.test_destination(caller, destination_id)
