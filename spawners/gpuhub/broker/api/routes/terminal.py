"""Terminals and sshd in workers over WebSockets, for the jobs' owners only.

Binary frames carry the terminal's input and output. The client's text frame `{"resize": [columns, rows]}` changes its
size. The server's last text frame is `{"exit": code}`, with `error` as well where the terminal failed.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from functools import partial
from typing import Annotated, cast
from urllib.parse import urlsplit

from fastapi import APIRouter, Query
from starlette.websockets import WebSocket, WebSocketDisconnect

from gpuhub.broker import audit
from gpuhub.broker.admission import access
from gpuhub.broker.api import problems
from gpuhub.broker.api.auth import Authenticator
from gpuhub.broker.api.streams import AccessWatch
from gpuhub.broker.files.courier_client import CourierClient
from gpuhub.broker.files.user_files import UserFiles
from gpuhub.broker_api.schemas import WorkerState
from gpuhub.common.errors import Conflict, GpuhubError, InvalidRequest, NodeUnreachable, NotAllowed
from gpuhub.common.tasks import wait_for_first
from gpuhub.domain.models import JobRow, WorkerRow

#: Exit code that is reported for a terminal that failed.
BROKEN_EXIT_CODE = 255
_MAX_CELLS = 1000
#: Maximum length of a message about the size, characters; a longer one is not parsed.
_MAX_RESIZE_CHARACTERS = 100

Cells = Annotated[int, Query(ge=1, le=_MAX_CELLS)]

api = APIRouter(prefix="/api/v1")


@api.websocket("/jobs/{job_id}/shell")
async def shell(
    websocket: WebSocket,
    job_id: str,
    *,
    worker: Annotated[int, Query(ge=0, le=100_000)] = 0,
    cols: Cells = 80,
    rows: Cells = 24,
    command: Annotated[str, Query(max_length=8192)] = "",
) -> None:
    """Run a login shell, or a command in one, in a worker of one of the caller's jobs."""
    arguments = ("shell", f"--columns={cols}", f"--rows={rows}", f"--run={command}")
    await _serve_program(websocket, job_id, worker, access.SHELLS, arguments)


@api.websocket("/jobs/{job_id}/ssh")
async def ssh(
    websocket: WebSocket,
    job_id: str,
    *,
    worker: Annotated[int, Query(ge=0, le=100_000)] = 0,
    key: Annotated[str, Query(max_length=200)] = "",
) -> None:
    """Run sshd in a worker of one of the caller's jobs, for the owner of this public key.

    Binary frames carry its connection; the first line is JSON with the host key and the user's name there.
    """
    await _serve_program(websocket, job_id, worker, access.SSH, ("ssh", f"--key={key}"))


async def _serve_program(
    websocket: WebSocket, job_id: str, worker: int, kind: access.StreamKind, arguments: tuple[str, ...]
) -> None:
    """Run a program of the courier's in a running worker of one of the caller's jobs, or refuse the connection."""
    files = cast("UserFiles", websocket.app.state.user_files)
    try:
        check_origin(websocket.headers.get("origin"), websocket.headers.get("host", ""))
        watch = AccessWatch(
            authenticator=cast("Authenticator", websocket.app.state.authenticator),
            authorization=websocket.headers.get("authorization"),
            address=audit.client_address(websocket.scope),
        )
        caller = await watch.authenticator.identify(watch.authorization, watch.address)
        job = await files.find_own_job(caller, job_id)
        worker_row = find_running_worker(job, worker)
        if any("\0" in argument for argument in arguments):
            raise InvalidRequest("command, key: it contains a null character")
        with files.streams.acquire(kind, job.owner):
            async with files.couriers.connect_worker(job, worker_row, arguments) as client:
                await websocket.accept()
                await _serve(websocket, client, watch, partial(files.streams.take_turn, job.owner))
    except GpuhubError as error:
        await websocket.send_denial_response(
            problems.build_response(problems.http_status(error), str(error), error.code)
        )


def check_origin(origin: str | None, host: str) -> None:
    """Refuse a page of another site; programs send no origin, or their own.

    Raises:
        NotAllowed: the origin is another site.
    """
    if origin is not None and urlsplit(origin).netloc != host:
        raise NotAllowed("pages of other sites may not open terminals")


def find_running_worker(job: JobRow, index: int) -> WorkerRow:
    """Return the running worker with this index.

    Raises:
        Conflict: it does not run.
    """
    running = [worker for worker in job.workers if worker.state is WorkerState.RUNNING]
    for worker in running:
        if worker.index == index:
            return worker
    indexes = ", ".join(str(worker.index) for worker in running) or "none"
    raise Conflict(f"job {job.id} is {job.state}: worker {index} does not run; running workers: {indexes}")


async def _serve(websocket: WebSocket, client: CourierClient, watch: AccessWatch, take_turn: access.TakeTurn) -> None:
    """Connect client and program until the program ends, the client disconnects or the caller is refused."""
    input_task = asyncio.ensure_future(_pass_input(websocket, client, take_turn))
    output_task = asyncio.ensure_future(_pass_output(websocket, client, take_turn))
    refusal_task = asyncio.ensure_future(watch.wait_until_refused())
    if refusal_task in await wait_for_first(input_task, output_task, refusal_task):
        await _send_end(websocket, {"exit": BROKEN_EXIT_CODE, "error": refusal_task.result()})


async def _pass_input(websocket: WebSocket, client: CourierClient, take_turn: access.TakeTurn) -> None:
    """Pass input until the client disconnects. An ended shell accepts no input, but may still have output."""
    with suppress(WebSocketDisconnect):
        while True:
            message = await websocket.receive()
            websocket._raise_on_disconnect(message)
            await take_turn(len(message.get("bytes") or ""))
            with suppress(NodeUnreachable):
                if message.get("bytes") is not None:
                    await client.send(message["bytes"])
                elif (size := parse_resize(message.get("text") or "")) is not None:
                    await client.resize(*size)


async def _pass_output(websocket: WebSocket, client: CourierClient, take_turn: access.TakeTurn) -> None:
    try:
        async for data in client.read_output():
            await take_turn(len(data))
            await websocket.send_bytes(data)
        code = client.result.get("exit")
        last: dict[str, object] = {"exit": code if type(code) is int else BROKEN_EXIT_CODE}
    except GpuhubError as error:
        last = {"exit": BROKEN_EXIT_CODE, "error": str(error)}
    await _send_end(websocket, last)


async def _send_end(websocket: WebSocket, last: dict[str, object]) -> None:
    with suppress(WebSocketDisconnect, RuntimeError):
        await websocket.send_text(json.dumps(last))
        await websocket.close()


def parse_resize(text: str) -> tuple[int, int] | None:
    """Return columns and rows of `{"resize": [120, 40]}`; None for any other text."""
    if len(text) > _MAX_RESIZE_CHARACTERS:
        return None
    try:
        columns, rows = json.loads(text)["resize"]
    except (ValueError, KeyError, TypeError):
        return None
    is_size = all(type(cells) is int and 0 < cells <= _MAX_CELLS for cells in (columns, rows))
    return (columns, rows) if is_size else None
