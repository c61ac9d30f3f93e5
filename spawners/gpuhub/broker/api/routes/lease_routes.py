"""HTTP routes of leases."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Query, Request, Response

from gpuhub.broker.api.dependencies import Broker, Caller, Lists, Owner, ResourceId, Version, WaitS, create_router
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.operations.notebook_datasets import LeaseStaging
from gpuhub.broker_api.schemas import (
    ActivationRequest,
    ExtensionRequest,
    LeaseRequest,
    LeaseState,
    LeaseView,
    PendingReasonView,
    StagingView,
)


async def get_staging(request: Request) -> LeaseStaging:
    """Return the app's transfers of datasets."""
    return cast("LeaseStaging", request.app.state.staging)


Staging = Annotated[LeaseStaging, Depends(get_staging)]
State = Annotated[LeaseState | None, Query(description="Only those in this state")]
OnNode = Annotated[str | None, Query(max_length=64, description="Only those with containers on this node")]

api = create_router("leases")


@api.post("/leases", status_code=201, responses=document_problems(409, 413, 422, 429))
async def post_lease(body: LeaseRequest, caller: Caller, broker: Broker, wait_s: WaitS = 0.0) -> LeaseView:
    """Request a lease for a notebook; a server that has a lease already gets that one.

    With `wait_s`, the answer comes with the grant, at the latest after that time.
    """
    return await broker.request_lease(caller, body, wait_s)


@api.get("/leases", response_model=list[LeaseView], responses=document_problems(422, 429))
async def get_leases(
    caller: Caller, broker: Broker, lists: Lists, *, owner: Owner = None, state: State = None, node: OnNode = None
) -> Response:
    """Return leases that have not ended: the caller's own, or all for an administrator."""
    return await lists.render(caller, broker.leases(caller, owner=owner, state=state, node=node))


@api.get("/leases/{lease_id}", responses=document_problems(404, 422))
async def get_lease(
    lease_id: ResourceId, caller: Caller, broker: Broker, wait_s: WaitS = 0.0, version: Version = None
) -> LeaseView:
    """Return one lease; with `wait_s` and `version`, as soon as its version differs."""
    return await broker.wait_lease(caller, lease_id, version, wait_s)


@api.delete("/leases/{lease_id}", responses=document_problems(404, 422))
async def delete_lease(lease_id: ResourceId, caller: Caller, broker: Broker, wait_s: WaitS = 0.0) -> LeaseView:
    """Release a lease; its GPUs are free when its containers are proven to be gone.

    With `wait_s`, the answer comes with that proof, at the latest after that time.
    """
    return await broker.release(caller, lease_id, wait_s)


@api.post("/leases/{lease_id}/activate", responses=document_problems(404, 409, 413, 422))
async def post_activate(lease_id: ResourceId, body: ActivationRequest, caller: Caller, broker: Broker) -> LeaseView:
    """Record the notebook's container, which may be started after this succeeds."""
    return await broker.activate(caller, lease_id, body)


@api.post("/leases/{lease_id}/stage", responses=document_problems(404, 409, 422))
async def post_stage(lease_id: ResourceId, caller: Caller, staging: Staging, wait_s: WaitS = 0.0) -> StagingView:
    """Copy the datasets of a notebook's granted lease to its node's disk; for the hub's spawner only.

    The answer comes when all are there, or after `wait_s` with the progress.
    """
    return await staging.stage(caller, lease_id, wait_s)


@api.get("/leases/{lease_id}/why", responses=document_problems(404, 409, 422))
async def get_why(lease_id: ResourceId, caller: Caller, broker: Broker) -> PendingReasonView:
    """Explain why a request waits, and when it would start without each of its requirements."""
    return await broker.why(caller, lease_id)


@api.post("/leases/{lease_id}/extend", responses=document_problems(404, 409, 413, 422))
async def post_extend(lease_id: ResourceId, body: ExtensionRequest, caller: Caller, broker: Broker) -> LeaseView:
    """Extend a lease within its limits, unless other requests wait for its GPUs."""
    return await broker.extend(caller, lease_id, body)


@api.post("/leases/{lease_id}/force", responses=document_problems(404, 409, 422))
async def post_force(lease_id: ResourceId, caller: Caller, broker: Broker) -> LeaseView:
    """Free a lease's GPUs without proof that its containers are gone. Administrators only."""
    return await broker.force(caller, lease_id)
