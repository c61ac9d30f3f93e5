"""The HTTP route of the power of nodes."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Depends, Request

from gpuhub.broker.api.dependencies import API, Caller, identify, refuse_unknown_query
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.api.routes.routes import Node
from gpuhub.broker.operations.power import PowerOperations
from gpuhub.broker_api.schemas import NodeView, PowerRequest


async def get_power_operations(request: Request) -> PowerOperations:
    """Return the operations on the power of the app's nodes."""
    return cast("PowerOperations", request.app.state.power)


Operations = Annotated[PowerOperations, Depends(get_power_operations)]

api = APIRouter(prefix=API, dependencies=[Depends(identify), Depends(refuse_unknown_query)], tags=["nodes"])


@api.post("/nodes/{name}/power", responses=document_problems(404, 409, 413, 422))
async def post_power(name: Node, body: PowerRequest, caller: Caller, power: Operations) -> NodeView:
    """Wake a node, or put one to sleep that nothing uses. Administrators only."""
    return await power.switch(caller, name, body)
