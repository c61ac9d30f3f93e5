"""Routes to files, logs and job states, for their owners only."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from gpuhub.broker.api.dependencies import Caller, ResourceId, identify, refuse_unknown_query
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.files.user_files import FileStream, UserFiles
from gpuhub.broker_api.schemas import UploadResult

TAR = "application/x-tar"
#: Largest integer of a database column, and of a file's size.
_MAX_INT = 2**63 - 1


async def get_user_files(request: Request) -> UserFiles:
    """Return the app's user files."""
    return cast("UserFiles", request.app.state.user_files)


Files = Annotated[UserFiles, Depends(get_user_files)]
RelativePath = Annotated[str, Query(max_length=1024, description="Path relative to the home, such as `work/train.py`")]
Offset = Annotated[int, Query(ge=0, le=_MAX_INT, description="First byte of the answer")]
Rank = Annotated[int | None, Query(ge=0, le=65535, description="Only the output of this rank, from the latest start")]
Follow = Annotated[bool, Query(description="Continue until the job has ended")]

api = APIRouter(prefix="/api/v1", dependencies=[Depends(identify), Depends(refuse_unknown_query)])


class FileStreamResponse(StreamingResponse):
    """A response that sends a stream until its end, and closes it when the client disconnects."""

    def __init__(self, stream: FileStream, media_type: str) -> None:
        super().__init__(stream.parts, media_type=media_type, headers={"X-Content-Type-Options": "nosniff"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.close()


@api.put(
    "/files",
    tags=["files"],
    response_model=UploadResult,
    responses=document_problems(413, 422, 429, 500, 507),
    openapi_extra={
        "requestBody": {"required": True, "content": {TAR: {"schema": {"type": "string", "format": "binary"}}}}
    },
)
async def put_files(path: RelativePath, caller: Caller, files: Files, request: Request) -> Any:
    """Unpack a tar, with or without gzip, below a folder of the caller's home; a missing folder is created."""
    try:
        return await files.upload(caller, path, request.stream())
    except ClientDisconnect:
        return Response(status_code=422)  # the client has disconnected


@api.get(
    "/files",
    tags=["files"],
    response_class=Response,
    responses={200: {"content": {TAR: {}}}, **document_problems(404, 413, 422, 429, 500)},
)
async def get_files(path: RelativePath, caller: Caller, files: Files) -> Response:
    """Return a file or folder of the caller's home as a tar, with names relative to its parent folder."""
    return FileStreamResponse(await files.download(caller, path), TAR)


@api.get(
    "/jobs/{job_id}/logs",
    tags=["files"],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **document_problems(404, 409, 422, 429, 500)},
)
async def get_logs(
    job_id: ResourceId, caller: Caller, files: Files, *, offset: Offset = 0, rank: Rank = None, follow: Follow = False
) -> Response:
    """Return the output of one of the caller's detached jobs."""
    return FileStreamResponse(
        await files.read_logs(caller, job_id, offset=offset, rank=rank, follow=follow), "text/plain"
    )


@api.get("/jobs/{job_id}/state", tags=["files"], responses=document_problems(404, 409, 422, 429, 500))
async def get_state(job_id: ResourceId, caller: Caller, files: Files) -> Any:
    """Return the status that one of the caller's detached jobs reported last."""
    return await files.read_state(caller, job_id)
