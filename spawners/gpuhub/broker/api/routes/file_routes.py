"""HTTP routes of users' files, and of logs and states of their jobs. Owners alone reach theirs."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import Depends, Query, Request, Response
from starlette.requests import ClientDisconnect

from gpuhub.broker.api.dependencies import MAX_INT, Caller, ResourceId, Watch, create_router
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.api.streams import FileStreamResponse
from gpuhub.broker.files.user_files import UserFiles
from gpuhub.broker_api.schemas import UploadResult

#: Largest end of a job's output that can be requested, bytes.
MAX_TAIL_BYTES = 1024 * 1024
TAR = "application/x-tar"


async def get_user_files(request: Request) -> UserFiles:
    """Return the app's user files."""
    return cast("UserFiles", request.app.state.user_files)


Files = Annotated[UserFiles, Depends(get_user_files)]
RelativePath = Annotated[str, Query(max_length=1024, description="Path relative to the home, such as `work/train.py`")]
Offset = Annotated[int, Query(ge=0, le=MAX_INT, description="First byte of the answer")]
Rank = Annotated[int | None, Query(ge=0, le=65535, description="Only the output of this rank, from the latest start")]
Tail = Annotated[
    int | None, Query(ge=0, le=MAX_TAIL_BYTES, description="At most this many bytes, from the end of the output so far")
]
Follow = Annotated[bool, Query(description="Continue until the job has ended")]

api = create_router("files")


@api.put(
    "/files",
    response_model=UploadResult,
    responses=document_problems(409, 413, 422, 429, 500, 507),
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
    response_class=Response,
    responses={200: {"content": {TAR: {}}}, **document_problems(404, 409, 413, 422, 429, 500)},
)
async def get_files(path: RelativePath, caller: Caller, files: Files, watch: Watch) -> Response:
    """Return a file or folder of the caller's home as a tar, with names relative to its parent folder."""
    return FileStreamResponse(await files.download(caller, path), TAR, watch)


@api.get(
    "/jobs/{job_id}/logs",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **document_problems(404, 409, 422, 429, 500)},
)
async def get_logs(
    job_id: ResourceId,
    caller: Caller,
    files: Files,
    watch: Watch,
    *,
    offset: Offset = 0,
    rank: Rank = None,
    tail: Tail = None,
    follow: Follow = False,
) -> Response:
    """Return the output of one of the caller's detached jobs."""
    return FileStreamResponse(
        await files.read_logs(caller, job_id, offset=offset, rank=rank, tail=tail, follow=follow), "text/plain", watch
    )


@api.get(
    "/jobs/{job_id}/state",
    response_class=Response,
    responses={200: {"content": {"application/json": {}}}, **document_problems(404, 409, 413, 422, 429, 500)},
)
async def get_state(job_id: ResourceId, caller: Caller, files: Files) -> Response:
    """Return the status that one of the caller's detached jobs reported last."""
    return Response(await files.read_state(caller, job_id), media_type="application/json")
