"""The hub's client of the broker. Async; errors are those that the broker raised."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from pydantic import TypeAdapter

from gpuhub import errors
from gpuhub.broker import refusals
from gpuhub.broker.schemas import Activation, ClusterView, Lease, LeaseRequest

#: How long a restart of the broker is waited out, seconds.
PATIENCE_S = 15.0
_RETRY_S = 0.25
_ANSWER_S = 10.0  # for an ordinary answer

_LEASES = TypeAdapter(list[Lease])
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
        refusals.HubUnreachable,
    )
}
_BY_STATUS: dict[int, type[errors.GpuhubError]] = {
    401: refusals.NotKnown,
    403: errors.NotAllowed,
    404: errors.NotFound,
    409: errors.Conflict,
    422: errors.InvalidRequest,
    429: refusals.TooManyWaiting,
}


def parse_problem(status: int, body: bytes) -> errors.GpuhubError:
    """The error in a problem document; a gateway's answer of its own is the broker's silence."""
    try:
        problem = httpx.Response(status, content=body).json()
        code, detail = str(problem["code"]), str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        code, detail = "", f"the broker answered with HTTP status {status}"
    fallback = errors.BrokerUnreachable if status >= 500 else errors.GpuhubError
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, fallback)
    return kind(detail)


class BrokerClient:
    """The broker at `url` (ends in `/services/broker`), with a service's token."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        patience_s: float = PATIENCE_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._patience_s = patience_s
        self._client = httpx.AsyncClient(
            base_url=f"{url}/api/v1",
            headers={"Authorization": f"token {token}"},
            timeout=_ANSWER_S,
            # Two hundred users may wait at once, each with a long poll.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            # Proxy variables of the environment are for the internet.
            trust_env=False,
            transport=transport,
        )

    async def close(self) -> None:
        """Drop the connections."""
        await self._client.aclose()

    async def request_lease(self, request: LeaseRequest) -> Lease:
        """Ask for a lease; a repeated request gets the same one."""
        return Lease.model_validate(await self._send("POST", "/leases", json=request.model_dump(mode="json")))

    async def leases(self) -> list[Lease]:
        """All leases that have not ended."""
        return _LEASES.validate_python(await self._send("GET", "/leases"))

    async def get_lease(self, lease_id: str, *, wait_s: float = 0, version: int | None = None) -> Lease:
        """One lease; with `version` as soon as it has another one, at the latest after `wait_s`."""
        params: dict[str, str] = {}
        if version is not None:
            params = {"wait_s": f"{min(max(wait_s, 0.0), 30.0):.3f}", "version": str(version)}
        path = f"/leases/{lease_id}"
        return Lease.model_validate(await self._send("GET", path, params=params, limit_s=_ANSWER_S + wait_s))

    async def activate(self, lease_id: str, container_id: str) -> Lease:
        """Say that the container exists; it may be started when this returns."""
        body = Activation(container_id=container_id).model_dump(mode="json")
        return Lease.model_validate(await self._send("POST", f"/leases/{lease_id}/activate", json=body))

    async def release(self, lease_id: str) -> Lease:
        """End a lease."""
        return Lease.model_validate(await self._send("DELETE", f"/leases/{lease_id}"))

    async def cluster(self) -> ClusterView:
        """Everything at this moment."""
        return ClusterView.model_validate(await self._send("GET", "/cluster"))

    async def _send(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: dict[str, str] | None = None,
        limit_s: float = _ANSWER_S,
    ) -> Any:
        """The answer; every call may be repeated, so silence is waited out for a while.

        Raises:
            BrokerUnreachable: no answer within the patience.
            GpuhubError: what the broker refused.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        while True:
            try:
                return await self._send_once(method, path, json, params, limit_s)
            except (errors.BrokerUnreachable, refusals.HubUnreachable):
                if loop.time() + _RETRY_S > deadline:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def _send_once(self, method: str, path: str, json: Any, params: dict[str, str] | None, limit_s: float) -> Any:
        try:
            answer = await self._client.request(method, path, json=json, params=params, timeout=limit_s)
        except httpx.HTTPError as error:
            raise errors.BrokerUnreachable("The GPU broker does not answer at present.") from error
        if answer.is_success:
            try:
                return answer.json()
            except ValueError as error:
                raise errors.BrokerUnreachable("What answers is not the GPU broker.") from error
        raise parse_problem(answer.status_code, answer.content)
