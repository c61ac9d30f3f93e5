"""HTTP routes of idle and suspended notebooks: reports of notebooks, and what their owners and the hub's culler ask."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request

from gpuhub.broker.api.dependencies import Caller, ResourceId, create_router
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.operations.idle import IdleOperations
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.schemas import ActivityAnswer, ActivityReport, LeaseView, ReclaimAnswer, ReclaimRequest


async def get_idle_operations(request: Request) -> IdleOperations:
    """Return the operations on the app's idle notebooks."""
    return IdleOperations(cast("BrokerState", request.app.state.core))


Operations = Annotated[IdleOperations, Depends(get_idle_operations)]

api = create_router("idle notebooks")


@api.post("/leases/{lease_id}/activity", responses=document_problems(404, 413, 422))
async def post_activity(lease_id: ResourceId, body: ActivityReport, caller: Caller, idle: Operations) -> ActivityAnswer:
    """Report what happens in a notebook; the answer says when it will be stopped if it stays idle."""
    return await idle.report(caller, lease_id, body)


@api.post("/leases/{lease_id}/keep", responses=document_problems(404, 409, 422))
async def post_keep(lease_id: ResourceId, caller: Caller, idle: Operations) -> LeaseView:
    """Keep an idle notebook for `[idle] keep`, at most for `longest_keep` in all."""
    return await idle.keep(caller, lease_id)


@api.post("/leases/{lease_id}/suspend", responses=document_problems(404, 409, 422))
async def post_suspend(lease_id: ResourceId, caller: Caller, idle: Operations) -> LeaseView:
    """Move a notebook's GPU memory into host memory, so that others can have its GPU; its variables stay."""
    return await idle.suspend(caller, lease_id)


@api.post("/leases/{lease_id}/resume", responses=document_problems(404, 422))
async def post_resume(lease_id: ResourceId, caller: Caller, idle: Operations) -> LeaseView:
    """Have a suspended notebook wait for the GPU that it was suspended on."""
    return await idle.resume(caller, lease_id)


@api.post("/reclaims", responses=document_problems(413, 422))
async def post_reclaim(body: ReclaimRequest, caller: Caller, idle: Operations) -> ReclaimAnswer:
    """Return whether the notebook should be stopped now because it is idle. Only for the hub's culler."""
    return await idle.reclaim(caller, body)
