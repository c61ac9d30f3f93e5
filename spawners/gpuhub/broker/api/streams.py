"""Streams that are open for long: a caller who may no longer use the broker loses logs, downloads and terminals too."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from gpuhub.broker.api.auth import Identifier
from gpuhub.broker.files.user_files import FileStream
from gpuhub.broker_api.errors import HubUnreachable, TooManyRequests
from gpuhub.common.errors import NotAllowed
from gpuhub.common.tasks import cancel_tasks
from gpuhub.domain.models import Identity

#: Interval between two checks of a stream's caller, seconds.
RECHECK_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessWatch:
    """Repeats the identification of a stream's caller."""

    authenticator: Identifier
    authorization: str | None
    address: str

    async def wait_until_changed(self, caller: Identity) -> None:
        """Return as soon as the caller is refused or has other rights or groups than `caller`."""
        while True:
            await asyncio.sleep(RECHECK_S)
            try:
                if await self.authenticator.confirm(self.authorization, self.address) != caller:
                    return
            except (HubUnreachable, TooManyRequests):
                continue
            except NotAllowed:
                return

    async def wait_until_refused(self) -> str:
        """Return the reason as soon as the caller is refused; a hub that does not answer refuses no caller."""
        while True:
            await asyncio.sleep(RECHECK_S)
            try:
                await self.authenticator.confirm(self.authorization, self.address)
            except (HubUnreachable, TooManyRequests):
                continue
            except NotAllowed as refusal:
                return str(refusal)


class RefusalWatch(Protocol):
    """Knows when the caller of a stream may no longer have it."""

    async def wait_until_refused(self) -> str:
        """Return the reason as soon as the caller is refused."""
        ...


class FileStreamResponse(StreamingResponse):
    """A response that sends a stream until its end or the caller is refused, and closes it at a disconnect.

    A client that is refused gets no end of the response, so that it does not take a part of a file for the whole; with
    `ends_in_order` it does, because the proxy passes on the end of a response alone, and not of its connection.
    """

    def __init__(
        self, stream: FileStream, media_type: str, watch: RefusalWatch, *, ends_in_order: bool = False
    ) -> None:
        super().__init__(stream.parts, media_type=media_type, headers={"X-Content-Type-Options": "nosniff"})
        self._stream = stream
        self._watch = watch
        self._ends_in_order = ends_in_order

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        sending = asyncio.ensure_future(super().__call__(scope, receive, send_noted))
        refusal = asyncio.ensure_future(self._watch.wait_until_refused())
        try:
            await asyncio.wait([sending, refusal], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
            elif self._ends_in_order and has_begun:
                await cancel_tasks((sending,))
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await cancel_tasks((sending, refusal))
            await self._stream.close()
