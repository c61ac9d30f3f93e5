"""Terminals in workers over WebSockets: for their owners alone.

Binary frames both ways are the terminal; the client's text frame `{"resize": [columns, rows]}` gives it another size;
the server's last one is `{"exit": code}`, with `error` beside it where the terminal broke off.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Annotated, cast
from urllib.parse import urlsplit

from fastapi import APIRouter, Query
from starlette.websockets import WebSocket, WebSocketDisconnect

from gpuhub.broker import problems, slots
from gpuhub.broker.asking import address_of
from gpuhub.broker.auth import Identities
from gpuhub.broker.homes import Homes
from gpuhub.broker.rows import JobRow, WorkerRow
from gpuhub.broker.schemas import WorkerState
from gpuhub.broker.talks import Talk
from gpuhub.containers.arguments import COURIER_COMMAND
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.execs import start_exec
from gpuhub.errors import Conflict, GpuhubError, InvalidRequest, NodeUnreachable, NotAllowed

#: What a terminal that broke off is said to have ended with.
BROKEN = 255
_MOST_CELLS = 1000

Cells = Annotated[int, Query(ge=1, le=_MOST_CELLS)]

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
    """A login shell, or a command in one, in a worker of one's own job."""
    homes = cast("Homes", websocket.app.state.homes)
    daemons = cast("Daemons", websocket.app.state.daemons)
    try:
        refuse_other_origin(websocket.headers.get("origin"), websocket.headers.get("host", ""))
        identities = cast("Identities", websocket.app.state.identities)
        who = await identities.identify(websocket.headers.get("authorization"), address_of(websocket))
        job = await homes.own_job(who, job_id)
        place = find_worker(job, worker)
        if "\0" in command:
            raise InvalidRequest("command: it has a null character in it")
        with homes.slots.take(slots.SHELLS, job.owner):
            words = ("shell", f"--columns={cols}", f"--rows={rows}", f"--run={command}")
            found = await start_exec(daemons, place.node, place.container_id or "", (*COURIER_COMMAND, *words))
            async with Talk(found) as talk:
                await websocket.accept()
                await _serve(websocket, talk)
    except GpuhubError as error:
        await websocket.send_denial_response(problems.build_response(problems.status_of(error), str(error), error.code))


def refuse_other_origin(origin: str | None, host: str) -> None:
    """Refuse a page of another site; programs send none, or their own.

    Raises:
        NotAllowed.
    """
    if origin is not None and urlsplit(origin).netloc != host:
        raise NotAllowed("a terminal is not for pages of other sites")


def find_worker(job: JobRow, index: int) -> WorkerRow:
    """The running worker of that number.

    Raises:
        Conflict: there is none that runs.
    """
    running = [worker for worker in job.workers if worker.state is WorkerState.RUNNING]
    for worker in running:
        if worker.index == index:
            return worker
    there = ", ".join(str(worker.index) for worker in running) or "none"
    raise Conflict(f"job {job.id} is {job.state}: worker {index} does not run; of its workers, these run: {there}")


async def _serve(websocket: WebSocket, talk: Talk) -> None:
    """Until the shell has ended, or the client is gone."""
    keys = asyncio.ensure_future(_pass_keys(websocket, talk))
    shown = asyncio.ensure_future(_pass_output(websocket, talk))
    try:
        await asyncio.wait([keys, shown], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (keys, shown):
            task.cancel()
        await asyncio.gather(keys, shown, return_exceptions=True)


async def _pass_keys(websocket: WebSocket, talk: Talk) -> None:
    """Until the client is gone. A shell that has ended takes no keys, and may still have something to show."""
    with suppress(WebSocketDisconnect):
        while True:
            message = await websocket.receive()
            websocket._raise_on_disconnect(message)
            with suppress(NodeUnreachable):
                if message.get("bytes") is not None:
                    await talk.send(message["bytes"])
                elif (size := parse_resize(message.get("text") or "")) is not None:
                    await talk.resize(*size)


async def _pass_output(websocket: WebSocket, talk: Talk) -> None:
    try:
        async for data in talk.output():
            await websocket.send_bytes(data)
        last = {"exit": talk.done["exit"]}
    except GpuhubError as error:
        last = {"exit": BROKEN, "error": str(error)}
    with suppress(WebSocketDisconnect, RuntimeError):
        await websocket.send_text(json.dumps(last))
        await websocket.close()


def parse_resize(text: str) -> tuple[int, int] | None:
    """Columns and rows of `{"resize": [120, 40]}`; None for anything else."""
    try:
        columns, rows = json.loads(text)["resize"]
    except (ValueError, KeyError, TypeError):
        return None
    is_size = all(type(cells) is int and 0 < cells <= _MOST_CELLS for cells in (columns, rows))
    return (columns, rows) if is_size else None
