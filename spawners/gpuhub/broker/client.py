"""The client of the broker for the hub and the head node's commands. Async; errors are those that the broker raised."""

from __future__ import annotations

import asyncio
import copy
import ssl
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from gpuhub import errors
from gpuhub.broker import refusals
from gpuhub.broker.schemas import (
    Activation,
    ClusterView,
    CordonRequest,
    Event,
    Extension,
    Lease,
    LeaseRequest,
    NodeView,
    Reservation,
    ReservationRequest,
    UsageView,
    Why,
)

T = TypeVar("T")

#: How long a restart of the broker is waited out, seconds.
PATIENCE_S = 15.0
_RETRY_S = 0.25
_ANSWER_S = 10.0  # for an ordinary answer

_LEASE = TypeAdapter(Lease)
_LEASES = TypeAdapter(list[Lease])
_WHY = TypeAdapter(Why)
_NODEVIEW = TypeAdapter(NodeView)
_CLUSTERVIEW = TypeAdapter(ClusterView)
_RESERVATION = TypeAdapter(Reservation)
_NODES = TypeAdapter(list[NodeView])
_EVENTS = TypeAdapter(list[Event])
_RESERVATIONS = TypeAdapter(list[Reservation])
_USAGE = TypeAdapter(list[UsageView])
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
# What only the API's own programs can get wrong is not among them: it goes by its status.
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
        tls: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`tls`: for an https:// address, whom to trust and what to show."""
        self._patience_s = patience_s
        self._authorization = f"token {token}"
        self._client = httpx.AsyncClient(
            base_url=f"{url}/api/v1",
            timeout=_ANSWER_S,
            # Two hundred users may wait at once, each with a long poll.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            # Proxy variables of the environment are for the internet.
            trust_env=False,
            verify=tls or True,
            transport=transport,
        )

    async def close(self) -> None:
        """Drop the connections."""
        await self._client.aclose()

    def acting(self, token: str) -> Self:
        """The same broker over the same connections, asked with another token, and without patience."""
        other = copy.copy(self)
        other._authorization = f"token {token}"
        other._patience_s = 0.0
        return other

    async def request_lease(self, request: LeaseRequest) -> Lease:
        """Ask for a lease; a repeated request gets the same one."""
        return _read(_LEASE, await self._send("POST", "/leases", json=request.model_dump(mode="json")))

    async def leases(self, **wanted: str) -> list[Lease]:
        """Leases that have not ended; `owner`, `state` and `node` narrow them down."""
        return _read(_LEASES, await self._send("GET", "/leases", params=wanted))

    async def get_lease(self, lease_id: str, *, wait_s: float = 0, version: int | None = None) -> Lease:
        """One lease; with `version` as soon as it has another one, at the latest after `wait_s`."""
        params: dict[str, str] = {}
        if version is not None:
            params = {"wait_s": f"{min(max(wait_s, 0.0), 30.0):.3f}", "version": str(version)}
        path = f"/leases/{_quoted(lease_id)}"
        return _read(_LEASE, await self._send("GET", path, params=params, limit_s=_ANSWER_S + wait_s))

    async def activate(self, lease_id: str, container_id: str) -> Lease:
        """Say that the container exists; it may be started when this returns."""
        body = Activation(container_id=container_id).model_dump(mode="json")
        return _read(_LEASE, await self._send("POST", f"/leases/{_quoted(lease_id)}/activate", json=body))

    async def release(self, lease_id: str) -> Lease:
        """End a lease."""
        return _read(_LEASE, await self._send("DELETE", f"/leases/{_quoted(lease_id)}"))

    async def why(self, lease_id: str) -> Why:
        """Why a request waits, in full."""
        return _read(_WHY, await self._send("GET", f"/leases/{_quoted(lease_id)}/why"))

    async def extend(self, lease_id: str, time_limit_s: int) -> Lease:
        """More time: the lease then ends so many seconds from now."""
        body = Extension(time_limit_s=time_limit_s).model_dump(mode="json")
        return _read(_LEASE, await self._send("POST", f"/leases/{_quoted(lease_id)}/extend", json=body))

    async def force(self, lease_id: str) -> Lease:
        """Free a lease's GPUs without proof; administrators only."""
        return _read(_LEASE, await self._send("POST", f"/leases/{_quoted(lease_id)}/force"))

    async def change_node(self, node: str, change: str, request: CordonRequest | None = None) -> NodeView:
        """`change` is `cordon`, `drain` (both with a request) or `undrain`; administrators only."""
        body = None if request is None else request.model_dump(mode="json")
        return _read(_NODEVIEW, await self._send("POST", f"/nodes/{_quoted(node)}/{change}", json=body))

    async def nodes(self) -> list[NodeView]:
        """Every node with its GPUs."""
        return _read(_NODES, await self._send("GET", "/nodes"))

    async def events(self, *, after: int | None = None, limit: int = 100) -> list[Event]:
        """What the broker did, oldest first: the newest, or those next after `after`."""
        params = {"limit": str(limit)} | ({} if after is None else {"after": str(after)})
        return _read(_EVENTS, await self._send("GET", "/events", params=params))

    async def reservations(self) -> list[Reservation]:
        """All that have not ended."""
        return _read(_RESERVATIONS, await self._send("GET", "/reservations"))

    async def reserve(self, request: ReservationRequest) -> Reservation:
        """Keep GPUs for some users in a window; administrators only."""
        answer = await self._send("POST", "/reservations", json=request.model_dump(mode="json"))
        return _read(_RESERVATION, answer)

    async def cancel_reservation(self, reservation_id: str) -> None:
        """Keep them no longer; administrators only."""
        await self._send("DELETE", f"/reservations/{_quoted(reservation_id)}")

    async def usage(self, owner: str | None = None) -> list[UsageView]:
        """What owners have, had and may have."""
        params = {} if owner is None else {"owner": owner}
        return _read(_USAGE, await self._send("GET", "/usage", params=params))

    async def cluster(self) -> ClusterView:
        """Everything at this moment."""
        return _read(_CLUSTERVIEW, await self._send("GET", "/cluster"))

    async def _send(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: dict[str, str] | None = None,
        limit_s: float = _ANSWER_S,
    ) -> bytes:
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

    async def _send_once(
        self, method: str, path: str, json: Any, params: dict[str, str] | None, limit_s: float
    ) -> bytes:
        try:
            answer = await self._client.request(
                method,
                path,
                json=json,
                params=params,
                headers={"Authorization": self._authorization},
                timeout=limit_s,
            )
        except httpx.HTTPError as error:
            raise errors.BrokerUnreachable("The GPU broker does not answer at present.") from error
        if answer.is_success:
            if answer.content and answer.headers.get("Content-Type") != "application/json":
                raise errors.BrokerUnreachable("What answers is not the GPU broker.")
            return answer.content
        raise parse_problem(answer.status_code, answer.content)


def _read(kind: TypeAdapter[T], content: bytes) -> T:
    try:
        return kind.validate_json(content)
    except ValidationError as error:
        raise errors.BrokerUnreachable("The GPU broker answers in another version's words.") from error


def _quoted(identifier: str) -> str:
    """An id or a name as one part of a path, whatever stands in it."""
    return quote(identifier, safe="")
