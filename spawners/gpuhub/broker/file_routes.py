"""The routes to files, logs and states: for their owners alone."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from gpuhub.broker.asking import Id, Who, identify, refuse_unknown_query
from gpuhub.broker.homes import Homes, Stream
from gpuhub.broker.problems import documented
from gpuhub.broker.schemas import Unpacked

TAR = "application/x-tar"
#: What a database column, and a file's size, holds.
_MAX_INT = 2**63 - 1


async def get_homes(request: Request) -> Homes:
    """The one of the app."""
    return cast("Homes", request.app.state.homes)


TheHomes = Annotated[Homes, Depends(get_homes)]
RelativePath = Annotated[str, Query(max_length=1024, description="Below the home, such as `work/train.py`")]
Offset = Annotated[int, Query(ge=0, le=_MAX_INT, description="From this byte on")]
Rank = Annotated[int | None, Query(ge=0, le=65535, description="What this rank wrote in the latest start")]
Follow = Annotated[bool, Query(description="Until the job has ended")]

api = APIRouter(prefix="/api/v1", dependencies=[Depends(identify), Depends(refuse_unknown_query)])


class StreamAnswer(StreamingResponse):
    """An answer that goes on as long as there is something to be said, and breaks off when the client is gone."""

    def __init__(self, stream: Stream, media_type: str) -> None:
        super().__init__(stream.parts, media_type=media_type, headers={"X-Content-Type-Options": "nosniff"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.close()


@api.put(
    "/files",
    tags=["files"],
    response_model=Unpacked,
    responses=documented(413, 422, 429, 500, 507),
    openapi_extra={
        "requestBody": {"required": True, "content": {TAR: {"schema": {"type": "string", "format": "binary"}}}}
    },
)
async def put_files(path: RelativePath, who: Who, homes: TheHomes, request: Request) -> Any:
    """Unpack a tar, compressed by gzip or not, below a folder of one's own home, which is made if it is missing."""
    try:
        return await homes.put(who, path, request.stream())
    except ClientDisconnect:
        return Response(status_code=422)  # nobody reads it


@api.get(
    "/files",
    tags=["files"],
    response_class=Response,
    responses={200: {"content": {TAR: {}}}, **documented(404, 413, 422, 429, 500)},
)
async def get_files(path: RelativePath, who: Who, homes: TheHomes) -> Response:
    """A file or folder of one's own home as a tar; its own name, without the folders above it, comes first."""
    return StreamAnswer(await homes.get(who, path), TAR)


@api.get(
    "/jobs/{job_id}/logs",
    tags=["files"],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **documented(404, 409, 422, 429, 500)},
)
async def get_logs(
    job_id: Id, who: Who, homes: TheHomes, *, offset: Offset = 0, rank: Rank = None, follow: Follow = False
) -> Response:
    """What one's own detached job wrote."""
    return StreamAnswer(await homes.logs(who, job_id, offset=offset, rank=rank, follow=follow), "text/plain")


@api.get("/jobs/{job_id}/state", tags=["files"], responses=documented(404, 409, 422, 429, 500))
async def get_state(job_id: Id, who: Who, homes: TheHomes) -> Any:
    """Where one's own detached job says it is."""
    return await homes.state(who, job_id)
