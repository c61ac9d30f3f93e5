"""HTTP routes of jobs and of the recipes that they are made of."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Query, Request, Response

from gpuhub.broker.api.dependencies import Broker, Caller, Lists, ResourceId, Version, WaitS, create_router
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.operations.recipes import RecipeOperations
from gpuhub.broker_api.schemas import ArrayRequest, GroupRequest, JobCheckRequest, JobRequest, JobView, RecipeView


async def get_recipe_operations(request: Request) -> RecipeOperations:
    """Return the app's recipes."""
    return cast("RecipeOperations", request.app.state.recipes)


Recipes = Annotated[RecipeOperations, Depends(get_recipe_operations)]
Ended = Annotated[bool, Query(description="Also jobs that ended within `[jobs] remember`; newest first, at most 200")]

api = create_router("jobs")


@api.post("/jobs", status_code=201, responses=document_problems(404, 409, 413, 422, 429))
async def post_job(body: JobRequest, caller: Caller, broker: Broker) -> JobView:
    """Request workers, all or none; a run that has a job already gets that one."""
    return await broker.request_job(caller, body)


@api.get("/jobs", response_model=list[JobView], responses=document_problems(422, 429))
async def get_jobs(caller: Caller, broker: Broker, lists: Lists, ended: Ended = False) -> Response:
    """Return jobs that have not ended, with `ended` also recent ones: the caller's own, or all for an administrator."""
    return await lists.render(caller, await broker.jobs(caller, ended=ended))


@api.post(
    "/jobs/arrays",
    status_code=201,
    response_model=list[JobView],
    responses=document_problems(409, 413, 422, 429),
)
async def post_array(body: ArrayRequest, caller: Caller, broker: Broker, lists: Lists) -> Response:
    """Request an array of jobs with one GPU each; all are accepted, or none."""
    return await lists.render(caller, await broker.request_array(caller, body), 201)


@api.post(
    "/jobs/groups",
    status_code=201,
    response_model=list[JobView],
    responses=document_problems(404, 409, 413, 422, 429),
)
async def post_group(body: GroupRequest, caller: Caller, broker: Broker, lists: Lists) -> Response:
    """Request a job group, whose detached jobs get their GPUs at the same moment; all are accepted, or none."""
    return await lists.render(caller, await broker.request_group(caller, body), 201)


@api.post(
    "/jobs/check",
    status_code=204,
    response_class=Response,
    responses=document_problems(404, 409, 413, 422, 429),
)
async def post_check(body: JobCheckRequest, caller: Caller, broker: Broker) -> None:
    """Refuse what `POST /jobs`, `/jobs/arrays` or `/jobs/groups` would refuse now, and request nothing."""
    await broker.check_job(caller, body)


@api.get("/jobs/{job_id}", responses=document_problems(404, 422))
async def get_job(
    job_id: ResourceId, caller: Caller, broker: Broker, wait_s: WaitS = 0.0, version: Version = None
) -> JobView:
    """Return one job; with `wait_s` and `version`, as soon as its version differs."""
    return await broker.wait_job(caller, job_id, version, wait_s)


@api.delete("/jobs/{job_id}", responses=document_problems(404, 422))
async def delete_job(job_id: ResourceId, caller: Caller, broker: Broker) -> JobView:
    """Stop a job; its GPUs are free when its state is `ended`."""
    return await broker.stop_job(caller, job_id)


@api.post(
    "/jobs/{job_id}/renew",
    status_code=204,
    response_class=Response,
    responses=document_problems(404, 409, 422),
)
async def post_renew(job_id: ResourceId, caller: Caller, broker: Broker) -> None:
    """Report that the launch still runs; a job without these heartbeats ends."""
    await broker.renew(caller, job_id)


@api.get("/recipes", responses=document_problems(422))
async def get_recipes(_caller: Caller, recipes: Recipes) -> list[RecipeView]:
    """Return the lab's own recipes for `gpu-launch run recipe:NAME`."""
    return await recipes.list_recipes()
