"""The connection of clients to the broker: calls that are repeated, streams, and the errors that the broker reports."""

from __future__ import annotations

import asyncio
import copy
import functools
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import httpx
import httpx_sse
from pydantic import TypeAdapter, ValidationError

from gpuhub.broker_api import errors as refusals
from gpuhub.common import errors

T = TypeVar("T")

#: Time for which a call is repeated while the broker does not answer, as during its restart; seconds.
RETRY_LIMIT_S = 15.0
#: Delay between two attempts, seconds.
_RETRY_S = 0.25
#: Time limit of an ordinary answer, seconds.
ANSWER_S = 10.0
_JSON = "application/json"
TAR = "application/x-tar"

_find_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)

_BY_CODE: dict[str, type[errors.GpuhubError]] = {
    kind.code: kind
    for kind in (
        errors.InvalidRequest,
        errors.NotAllowed,
        errors.NotFound,
        errors.Conflict,
        errors.Unavailable,
        errors.NodeUnreachable,
        errors.ImageMissing,
        refusals.NotKnown,
        refusals.TooManyWaiting,
        refusals.TooManyJobs,
        refusals.TooManyStreams,
        refusals.TooManyRequests,
        refusals.HubUnreachable,
    )
}
# Codes that only a mistake in a client program causes are not in `_BY_CODE`: the status determines their class.
_BY_STATUS: dict[int, type[errors.GpuhubError]] = {
    401: refusals.NotKnown,
    403: errors.NotAllowed,
    404: errors.NotFound,
    409: errors.Conflict,
    422: errors.InvalidRequest,
    429: refusals.TooManyWaiting,
}


def parse_problem(status: int, body: bytes, retry_after: str | None = None) -> errors.GpuhubError:
    """Return the error of a problem document; an error page of a gateway counts as an unreachable broker.

    `retry_after` is the header of that name.
    """
    try:
        problem = httpx.Response(status, content=body).json()
        code, detail = str(problem["code"]), str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        code, detail = "", f"the broker answered with HTTP status {status}"
    fallback = errors.BrokerUnreachable if status >= 500 else errors.GpuhubError
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, fallback)
    if kind is refusals.TooManyRequests:
        is_known = retry_after is not None and retry_after.isdecimal()
        return refusals.TooManyRequests(detail, retry_after_s=float(retry_after or 0) if is_known else None)
    return kind(detail)


def parse_answer(kind: type[T], content: bytes) -> T:
    """Return the value in an answer of the broker.

    Raises:
        BrokerUnreachable: The broker has another version than this client.
    """
    try:
        value: T = _find_adapter(kind).validate_json(content)
    except ValidationError as error:
        raise errors.BrokerUnreachable("The GPU broker has another version than this client.") from error
    return value


class BrokerConnection:
    """The connection to the broker at `url` (ends in `/services/broker`), with a service's token."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        retry_limit_s: float = RETRY_LIMIT_S,
        tls: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`tls` has the trusted authorities and the client certificate for an https:// URL."""
        self._retry_limit_s = retry_limit_s
        self._authorization = f"token {token}"
        self._client = httpx.AsyncClient(
            base_url=f"{url}/api/v1",
            timeout=ANSWER_S,
            # Hundreds of users may wait at the same time, each with a long poll.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            # Proxy variables of the environment are for the internet.
            trust_env=False,
            verify=tls or True,
            transport=transport,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def acting(self, token: str) -> Self:
        """Return a client over the same connections with another token, which does not repeat calls."""
        other = copy.copy(self)
        other._authorization = f"token {token}"
        other._retry_limit_s = 0.0
        return other

    @asynccontextmanager
    async def _open(
        self, path: str, params: Mapping[str, str | list[str]], silence_s: float | None
    ) -> AsyncIterator[httpx.Response]:
        """Open a stream; it is not repeated."""
        request = self._client.build_request(
            "GET",
            path,
            params=params,
            headers={"Authorization": self._authorization, "Accept": "*/*"},
            timeout=httpx.Timeout(ANSWER_S, read=silence_s),
        )
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise errors.BrokerUnreachable("The GPU broker does not answer.") from error
        try:
            if not answer.is_success:
                body = await answer.aread()
                raise parse_problem(answer.status_code, body, answer.headers.get("Retry-After"))
            yield answer
        finally:
            await answer.aclose()

    async def _read_parts(
        self, path: str, params: Mapping[str, str | list[str]], silence_s: float | None
    ) -> AsyncIterator[bytes]:
        """Yield the content of a stream in parts as they come; it is not repeated."""
        async with self._open(path, params, silence_s) as answer:
            try:
                async for part in answer.aiter_bytes():
                    yield part
            except httpx.HTTPError as error:
                raise errors.BrokerUnreachable("The connection to the GPU broker has ended.") from error

    async def _send(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        params: Mapping[str, str | list[str]] | None = None,
        limit_s: float = ANSWER_S,
        kind: str = _JSON,
    ) -> bytes:
        """Return the answer; repeat the call, which is idempotent, while the broker does not answer or is busy.

        A call that is refused because of too many requests is repeated when it is allowed again. `content` is the tar
        of an upload, and `kind` the answer's content type.

        Raises:
            BrokerUnreachable: there was no answer within the client's retry limit.
            TooManyRequests: the call is allowed only after the client's retry limit.
            GpuhubError: the broker refused the call.
        """
        headers = {"Authorization": self._authorization} | ({} if content is None else {"Content-Type": TAR})
        request = self._client.build_request(
            method, path, json=json, content=content, params=params, headers=headers, timeout=limit_s
        )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._retry_limit_s
        while True:
            pause_s = _RETRY_S
            try:
                return await self._send_once(request, kind)
            except (errors.BrokerUnreachable, refusals.HubUnreachable, refusals.TooManyRequests) as error:
                if isinstance(error, refusals.TooManyRequests):
                    pause_s = error.retry_after_s or pause_s
                if loop.time() + pause_s > deadline:
                    raise
            await asyncio.sleep(pause_s)

    async def _send_once(self, request: httpx.Request, kind: str) -> bytes:
        try:
            answer = await self._client.send(request)
        except httpx.HTTPError as error:
            raise errors.BrokerUnreachable("The GPU broker does not answer.") from error
        if answer.is_success:
            if answer.content and answer.headers.get("Content-Type", "").partition(";")[0] != kind:
                raise errors.BrokerUnreachable("The answer is not from the GPU broker.")
            return answer.content
        raise parse_problem(answer.status_code, answer.content, answer.headers.get("Retry-After"))


async def read_events(answer: httpx.Response, kind: str) -> AsyncIterator[bytes]:
    """Yield the data of the server-sent events of one kind."""
    try:
        async for event in httpx_sse.EventSource(answer).aiter_sse():
            if event.event == kind:
                yield event.data.encode()
    except (httpx.HTTPError, httpx_sse.SSEError) as error:
        raise errors.BrokerUnreachable("The connection to the GPU broker has ended.") from error
