"""HTTP routes of output shares: for owners, and for the users with whom a job or notebook is shared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, cast

from fastapi import Depends, Path, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from gpuhub.broker.api.dependencies import Caller, Lists, ResourceId, Watch, create_router
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.api.routes.file_routes import MAX_TAIL_BYTES, Follow
from gpuhub.broker.api.routes.live_routes import MAX_STREAM_S, Duration, hold_stream, send_views
from gpuhub.broker.api.streams import AccessWatch, FileStreamResponse
from gpuhub.broker.operations.notebook_shares import NotebookShareOperations, SharedNotebook
from gpuhub.broker.operations.output_shares import SharedJob, ShareOperations
from gpuhub.broker_api.schemas import OutputShareView, ShareRequest, UserName
from gpuhub.broker_api.schemas.output_shares import NotebookShareRequest, SharedNotebookView


async def get_share_operations(request: Request) -> ShareOperations:
    """Return the app's operations on output shares."""
    return cast("ShareOperations", request.app.state.output_shares)


Shares = Annotated[ShareOperations, Depends(get_share_operations)]
Viewer = Annotated[UserName, Path(description="The user with whom the job is shared")]
SharedTail = Annotated[int, Query(ge=0, le=MAX_TAIL_BYTES, description="Bytes from the end of the output so far")]

api = create_router("output shares")


@api.get("/shares", response_model=list[OutputShareView], responses=document_problems(422, 429))
async def get_shares(caller: Caller, shares: Shares, lists: Lists) -> Response:
    """Return the caller's output shares and those with the caller; for administrators those of all users."""
    return await lists.render(caller, shares.list_shares(caller))


@api.delete("/shares", responses=document_problems(422))
async def delete_shares_of_user(
    caller: Caller, shares: Shares, user: Annotated[UserName, Query(description="A user without access")]
) -> list[OutputShareView]:
    """End all shares of a user and with a user, and return them; for the hub and administrators."""
    return await shares.end_all(caller, user)


@api.put("/jobs/{job_id}/shares/{viewer}", responses=document_problems(404, 409, 413, 422))
async def put_share(
    job_id: ResourceId, viewer: Viewer, body: ShareRequest, caller: Caller, shares: Shares
) -> OutputShareView:
    """Share the output of one of the caller's detached jobs, or set when an existing share ends."""
    return await shares.share(caller, job_id, viewer, body.for_s)


@api.delete("/jobs/{job_id}/shares/{viewer}", responses=document_problems(404, 422))
async def delete_share(job_id: ResourceId, viewer: Viewer, caller: Caller, shares: Shares) -> list[OutputShareView]:
    """End the share of a job with a user, also in open pages; return it, or nothing if there was none."""
    return await shares.end(caller, job_id, viewer)


@api.delete("/jobs/{job_id}/shares", responses=document_problems(404, 422))
async def delete_shares(job_id: ResourceId, caller: Caller, shares: Shares) -> list[OutputShareView]:
    """End all shares of a job, also in open pages; return those that there were."""
    return await shares.end(caller, job_id)


async def find_shared(job_id: ResourceId, caller: Caller, shares: Shares) -> SharedJob:
    """Return a job that the caller may view."""
    return await shares.find_shared_job(caller, job_id)


Shared = Annotated[SharedJob, Depends(find_shared)]


@api.get(
    "/stream/shared/{job_id}",
    response_class=EventSourceResponse,
    dependencies=[Depends(find_shared), Depends(hold_stream)],
    responses=document_problems(404, 422, 429),
)
async def stream_shared_job(
    job_id: ResourceId, caller: Caller, shares: Shares, watch: Watch, for_s: Duration = MAX_STREAM_S
) -> AsyncIterator[ServerSentEvent]:
    """Send events `shared`, each with the state of a job that the caller may view, until the share ends."""
    async for event in send_views("shared", shares.watch_job(caller, job_id), caller, watch, for_s):
        yield event


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareWatch:
    """Waits for the end of a viewer's access: to the broker, or to what is shared."""

    access: AccessWatch
    #: Returns when the share has ended.
    wait_until_ended: Callable[[], Awaitable[None]]

    async def wait_until_refused(self) -> str:
        """Return the reason as soon as the viewer is refused."""
        refusal = asyncio.ensure_future(self.access.wait_until_refused())
        end = asyncio.ensure_future(self.wait_until_ended())
        try:
            await asyncio.wait([refusal, end], return_when=asyncio.FIRST_COMPLETED)
            return refusal.result() if refusal.done() else "the share has ended"
        finally:
            for task in (refusal, end):
                task.cancel()
            await asyncio.gather(refusal, end, return_exceptions=True)


@api.get(
    "/shared/{job_id}/logs",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **document_problems(404, 409, 422, 429, 500)},
)
async def get_shared_logs(
    shared: Shared,
    caller: Caller,
    shares: Shares,
    watch: Watch,
    *,
    tail: SharedTail = MAX_TAIL_BYTES,
    follow: Follow = False,
) -> Response:
    """Return the end of the output of a job that the caller may view, which ends with the share."""
    stream = await shares.read_output(caller, shared, tail=tail, follow=follow)
    until_end = ShareWatch(access=watch, wait_until_ended=partial(shares.wait_until_ended, shared))
    return FileStreamResponse(stream, "text/plain", until_end, ends_in_order=True)


# -- notebooks --------------------------------------------------------------------------------------------------------


async def get_notebook_shares(request: Request) -> NotebookShareOperations:
    """Return the app's operations on shares of notebooks."""
    return cast("NotebookShareOperations", request.app.state.notebook_shares)


async def find_shared_notebook(
    notebook_id: ResourceId, caller: Caller, notebooks: Annotated[NotebookShareOperations, Depends(get_notebook_shares)]
) -> SharedNotebook:
    """Return a notebook that the caller may view."""
    return notebooks.find_shared(caller, notebook_id)


Notebooks = Annotated[NotebookShareOperations, Depends(get_notebook_shares)]
FoundNotebook = Annotated[SharedNotebook, Depends(find_shared_notebook)]


@api.put("/notebooks/shares/{viewer}", responses=document_problems(404, 409, 413, 422, 429, 500))
async def put_notebook_share(
    viewer: Viewer, body: NotebookShareRequest, caller: Caller, notebooks: Notebooks
) -> OutputShareView:
    """Share a saved notebook of the caller's home, or set when an existing share ends."""
    return await notebooks.share(caller, viewer, body)


@api.delete("/notebooks/{notebook_id}/shares/{viewer}", responses=document_problems(404, 422))
async def delete_notebook_share(
    notebook_id: ResourceId, viewer: Viewer, caller: Caller, notebooks: Notebooks
) -> list[OutputShareView]:
    """End the share of a notebook with a user; return it, or nothing if there was none."""
    return await notebooks.end(caller, notebook_id, viewer)


@api.delete("/notebooks/{notebook_id}/shares", responses=document_problems(404, 422))
async def delete_notebook_shares(
    notebook_id: ResourceId, caller: Caller, notebooks: Notebooks
) -> list[OutputShareView]:
    """End all shares of a notebook, and return those that there were."""
    return await notebooks.end(caller, notebook_id)


@api.get("/shared/notebooks/{notebook_id}", responses=document_problems(404, 409, 413, 422, 429, 500))
async def get_shared_notebook(shared: FoundNotebook, caller: Caller, notebooks: Notebooks) -> SharedNotebookView:
    """Return when a notebook was saved that the caller may view."""
    return await notebooks.read(caller, shared)


@api.get(
    "/shared/notebooks/{notebook_id}/html",
    response_class=Response,
    responses={200: {"content": {"text/html": {}}}, **document_problems(404, 409, 413, 422, 429, 500)},
)
async def get_shared_notebook_html(
    shared: FoundNotebook, caller: Caller, notebooks: Notebooks, watch: Watch
) -> Response:
    """Return a notebook that the caller may view as a page of HTML, which its owner controls: show it in a sandbox."""
    stream = await notebooks.render(caller, shared)
    until_end = ShareWatch(access=watch, wait_until_ended=partial(notebooks.wait_until_ended, shared))
    return FileStreamResponse(stream, "text/html", until_end)
