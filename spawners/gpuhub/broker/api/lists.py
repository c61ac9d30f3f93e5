"""Lists as answers: the largest answers of the broker, so one is rendered at a time, and a caller has few at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractContextManager, nullcontext

from fastapi import Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from gpuhub.broker.admission import access
from gpuhub.broker.views import slices
from gpuhub.domain.models import Identity

#: Bytes of an answer that are passed on before the client has read those before.
_PART = 64 * 1024


class ListRenderer:
    """Renders lists as JSON, one at a time with fair turns among callers."""

    def __init__(self) -> None:
        self._streams = access.ConcurrencyLimiter()
        self._turns = slices.FairTurns()

    def acquire(self, caller: Identity) -> AbstractContextManager[None]:
        """Count one list of the caller for the duration of the context; administrators and services have no limit.

        Raises:
            TooManyStreams: the caller has too many.
        """
        return nullcontext() if caller.sees_all else self._streams.acquire(access.LISTS, caller.name)

    async def render(self, caller: Identity, views: Iterable[BaseModel], status: int = 200) -> Response:
        """Return views as JSON; those of a lazy iterable are built at the caller's turn, and none of them is kept.

        FastAPI would check and convert all of them at once, which takes long for thousands.
        """
        async with self._turns.take(caller.name):
            texts = await slices.collect(view.model_dump_json() for view in views)
        body = f"[{','.join(texts)}]".encode()
        headers = {"content-length": str(len(body))}
        return StreamingResponse(_split(body), status, headers, media_type="application/json")


async def _split(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PART):
        yield body[start : start + _PART]
