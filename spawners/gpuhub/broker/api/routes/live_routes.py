"""HTTP routes of live views, by server-sent events: a view whenever it changes, at most once a second.

A client that connects again gets the current view at once, so that there is nothing to resume. Comments keep the
connection open while nothing changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, cast

from fastapi import Depends, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent

from gpuhub.broker.api.dependencies import Caller, OfGroups, Watch, create_router
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.api.streams import AccessWatch
from gpuhub.broker.operations.live import LiveViews
from gpuhub.domain.models import Identity

#: Maximum duration of a stream, seconds; the client then connects again.
MAX_STREAM_S = 600.0
#: Time after which a client connects again, milliseconds.
_RETRY_MS = 2000

Duration = Annotated[
    float, Query(ge=0, le=MAX_STREAM_S, description="Duration of the stream, seconds; 0 for the current view alone")
]


async def get_live_views(request: Request) -> LiveViews:
    """Return the app's live views."""
    return cast("LiveViews", request.app.state.live_views)


Live = Annotated[LiveViews, Depends(get_live_views)]


async def hold_stream(caller: Caller, live: Live) -> AsyncIterator[None]:
    """Count the stream until its end."""
    with live.acquire(caller):
        yield


async def check_groups(caller: Caller, live: Live, group: OfGroups = ()) -> None:
    """Refuse groups of callers who cannot ask for other users, before the stream begins."""
    live.check_groups(caller, group)


api = create_router("live views")


@api.get(
    "/stream/cluster",
    response_class=EventSourceResponse,
    dependencies=[Depends(check_groups), Depends(hold_stream)],
    responses=document_problems(422, 429),
)
async def stream_cluster(
    caller: Caller, live: Live, watch: Watch, group: OfGroups = (), for_s: Duration = MAX_STREAM_S
) -> AsyncIterator[ServerSentEvent]:
    """Send events `cluster`, each with the whole cluster as all users in the caller's groups see it."""
    async for event in send_views("cluster", live.watch_cluster(caller, group), caller, watch, for_s):
        yield event


@api.get(
    "/stream/own",
    response_class=EventSourceResponse,
    dependencies=[Depends(hold_stream)],
    responses=document_problems(422, 429),
)
async def stream_own(
    caller: Caller, live: Live, watch: Watch, for_s: Duration = MAX_STREAM_S
) -> AsyncIterator[ServerSentEvent]:
    """Send events `own`, each with the caller's leases, jobs and usage; for administrators with all users' usage."""
    async for event in send_views("own", live.watch_own(caller), caller, watch, for_s):
        yield event


async def send_views(
    kind: str, views: AsyncIterator[str], caller: Identity, watch: AccessWatch, for_s: float
) -> AsyncIterator[ServerSentEvent]:
    """Yield the first view, and further ones until the last, or the time is over, or the caller's rights change."""
    yield ServerSentEvent(raw_data=await anext(views), event=kind, retry=_RETRY_MS)
    end = asyncio.ensure_future(asyncio.sleep(for_s))
    change = asyncio.ensure_future(watch.wait_until_changed(caller))
    following: asyncio.Future[str | None] | None = None
    try:
        while True:
            following = asyncio.ensure_future(_take_next(views))
            await asyncio.wait([following, end, change], return_when=asyncio.FIRST_COMPLETED)
            if end.done() or change.done() or (view := following.result()) is None:
                return
            yield ServerSentEvent(raw_data=view, event=kind)
    finally:
        tasks = [task for task in (following, end, change) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _take_next(views: AsyncIterator[str]) -> str | None:
    return await anext(views, None)
