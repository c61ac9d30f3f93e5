"""HTTP routes of the limits of single users."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Path, Request, Response

from gpuhub.broker.api.dependencies import Caller, create_router
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.operations.user_limits import LimitOperations
from gpuhub.broker_api.schemas.limits import UserLimitsRequest, UserLimitsView
from gpuhub.common import names


async def get_limit_operations(request: Request) -> LimitOperations:
    """Return the operations on the limits of the app's users."""
    return cast("LimitOperations", request.app.state.user_limits)


Operations = Annotated[LimitOperations, Depends(get_limit_operations)]
User = Annotated[str, Path(pattern=f"^{names.USERNAME_PATTERN}$")]

api = create_router("users")


@api.get("/limits", responses=document_problems(422))
async def get_limits(caller: Caller, limits: Operations) -> list[UserLimitsView]:
    """Return the limits that were set for single users. Administrators only."""
    return limits.list_limits(caller)


@api.put("/limits/{owner}", responses=document_problems(413, 422))
async def put_limits(owner: User, body: UserLimitsRequest, caller: Caller, limits: Operations) -> UserLimitsView:
    """Set a user's limits in place of those of cluster.toml. Administrators only."""
    return await limits.set_limits(caller, owner, body)


@api.delete("/limits/{owner}", status_code=204, response_class=Response, responses=document_problems(404, 422))
async def delete_limits(owner: User, caller: Caller, limits: Operations) -> None:
    """Give a user the limits of cluster.toml back. Administrators only."""
    await limits.clear_limits(caller, owner)
