"""Async client of the broker for the hub and the head node's commands; it raises the errors that the broker reports."""

from __future__ import annotations

import asyncio
import copy
import ssl
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
import httpx_sse
from pydantic import TypeAdapter, ValidationError

from gpuhub.broker_api import errors as refusals
from gpuhub.broker_api.schemas import (
    ActivationRequest,
    ClusterView,
    CordonRequest,
    CostView,
    DestinationChange,
    DestinationRequest,
    DestinationView,
    EventView,
    ExtensionRequest,
    JobRequest,
    JobView,
    LeaseRequest,
    LeaseView,
    NodeView,
    PendingReasonView,
    ReclaimAnswer,
    ReclaimRequest,
    ReportDimension,
    ReportView,
    ReservationRequest,
    ReservationView,
    StagingView,
    UploadResult,
    UsageView,
    VisitView,
)
from gpuhub.broker_api.schemas.live import OwnView
from gpuhub.common import errors

T = TypeVar("T")

#: Time for which a call is repeated while the broker does not answer, as during its restart; seconds.
PATIENCE_S = 15.0
#: Delay between two attempts, seconds.
_RETRY_S = 0.25
#: Time limit of an ordinary answer, seconds.
_ANSWER_S = 10.0
#: Time limit of an answer with or after a file transfer, which may first start a container on a node; seconds.
_FILES_S = 120.0
#: Longest silence of a stream, seconds: the broker sends a comment every 15 s.
_SILENCE_S = 45.0
_JSON = "application/json"
_TAR = "application/x-tar"

_LEASE = TypeAdapter(LeaseView)
_RECLAIM = TypeAdapter(ReclaimAnswer)
_LEASES = TypeAdapter(list[LeaseView])
_JOB = TypeAdapter(JobView)
_JOBS = TypeAdapter(list[JobView])
_VISIT = TypeAdapter(VisitView)
_UPLOAD = TypeAdapter(UploadResult)
_WHY = TypeAdapter(PendingReasonView)
_STAGING = TypeAdapter(StagingView)
_NODEVIEW = TypeAdapter(NodeView)
_CLUSTERVIEW = TypeAdapter(ClusterView)
_RESERVATION = TypeAdapter(ReservationView)
_NODES = TypeAdapter(list[NodeView])
_EVENTS = TypeAdapter(list[EventView])
_RESERVATIONS = TypeAdapter(list[ReservationView])
_OWNVIEW = TypeAdapter(OwnView)
_USAGE = TypeAdapter(list[UsageView])
_DESTINATION = TypeAdapter(DestinationView)
_DESTINATIONS = TypeAdapter(list[DestinationView])
_COSTS = TypeAdapter(list[CostView])
_REPORT = TypeAdapter(ReportView)
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


class AsyncBrokerClient:
    """Client of the broker at `url` (ends in `/services/broker`), with a service's token."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        patience_s: float = PATIENCE_S,
        tls: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`tls` has the trusted authorities and the client certificate for an https:// URL."""
        self._patience_s = patience_s
        self._authorization = f"token {token}"
        self._client = httpx.AsyncClient(
            base_url=f"{url}/api/v1",
            timeout=_ANSWER_S,
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
        other._patience_s = 0.0
        return other

    async def request_lease(self, request: LeaseRequest) -> LeaseView:
        """Request a lease; a repeated request returns the same one."""
        return _read(_LEASE, await self._send("POST", "/leases", json=request.model_dump(mode="json")))

    async def leases(self, **wanted: str) -> list[LeaseView]:
        """Return leases that have not ended; `owner`, `state` and `node` filter them."""
        return _read(_LEASES, await self._send("GET", "/leases", params=wanted))

    async def get_lease(self, lease_id: str, *, wait_s: float = 0, version: int | None = None) -> LeaseView:
        """Return one lease; with `version` as soon as its version differs, at the latest after `wait_s` seconds."""
        params = _poll_params(wait_s, version)
        path = f"/leases/{_quoted(lease_id)}"
        return _read(_LEASE, await self._send("GET", path, params=params, limit_s=_ANSWER_S + wait_s))

    async def activate(self, lease_id: str, container_id: str) -> LeaseView:
        """Report that the container exists; it may be started when this returns."""
        body = ActivationRequest(container_id=container_id).model_dump(mode="json")
        return _read(_LEASE, await self._send("POST", f"/leases/{_quoted(lease_id)}/activate", json=body))

    async def stage(self, lease_id: str, *, wait_s: float = 0) -> StagingView:
        """Copy the datasets of a granted lease to its node, and return how far that is after `wait_s` at the latest."""
        path, params = f"/leases/{_quoted(lease_id)}/stage", {"wait_s": f"{wait_s:.3f}"}
        return _read(_STAGING, await self._send("POST", path, params=params, limit_s=_ANSWER_S + wait_s))

    async def release(self, lease_id: str) -> LeaseView:
        """Release a lease."""
        return _read(_LEASE, await self._send("DELETE", f"/leases/{_quoted(lease_id)}"))

    async def release_all(self, owner: str) -> int:
        """Release all leases of a user, those of jobs too; return their number."""
        leases = await self.leases(owner=owner)
        await asyncio.gather(*(self.release(lease.id) for lease in leases))
        return len(leases)

    async def why(self, lease_id: str) -> PendingReasonView:
        """Return all reasons why a request waits."""
        return _read(_WHY, await self._send("GET", f"/leases/{_quoted(lease_id)}/why"))

    async def extend(self, lease_id: str, time_limit_s: int) -> LeaseView:
        """Extend a lease, so that it ends `time_limit_s` seconds from now."""
        body = ExtensionRequest(time_limit_s=time_limit_s).model_dump(mode="json")
        return _read(_LEASE, await self._send("POST", f"/leases/{_quoted(lease_id)}/extend", json=body))

    async def force(self, lease_id: str) -> LeaseView:
        """Free a lease's GPUs without proof; administrators only."""
        return _read(_LEASE, await self._send("POST", f"/leases/{_quoted(lease_id)}/force"))

    async def keep(self, lease_id: str) -> LeaseView:
        """Keep an idle notebook."""
        return _read(_LEASE, await self._send("POST", f"/leases/{_quoted(lease_id)}/keep"))

    async def reclaim(self, owner: str, server: str) -> bool:
        """Return whether the hub's culler should stop a notebook now."""
        body = ReclaimRequest(owner=owner, server=server).model_dump(mode="json")
        return _read(_RECLAIM, await self._send("POST", "/reclaims", json=body)).stop

    async def request_job(self, request: JobRequest) -> JobView:
        """Request workers, all or none; a run that has a job already gets that one."""
        return _read(_JOB, await self._send("POST", "/jobs", json=request.model_dump(mode="json")))

    async def jobs(self) -> list[JobView]:
        """Return jobs that have not ended: the caller's own, or all for an administrator."""
        return _read(_JOBS, await self._send("GET", "/jobs"))

    async def get_job(self, job_id: str, *, wait_s: float = 0, version: int | None = None) -> JobView:
        """Return one job; with `version` as soon as its version differs, at the latest after `wait_s` seconds."""
        params = _poll_params(wait_s, version)
        path = f"/jobs/{_quoted(job_id)}"
        return _read(_JOB, await self._send("GET", path, params=params, limit_s=_ANSWER_S + wait_s))

    async def end_job(self, job_id: str) -> JobView:
        """Stop a job; its GPUs are free when its state is `ended`."""
        return _read(_JOB, await self._send("DELETE", f"/jobs/{_quoted(job_id)}"))

    async def open_visit(self, job_id: str) -> VisitView:
        """Open a visit of the caller's browser to a job's server."""
        return _read(_VISIT, await self._send("POST", f"/jobs/{_quoted(job_id)}/visits"))

    async def read_job_output(self, job_id: str) -> bytes:
        """Return the output that the caller's detached job has written so far."""
        return await self._send("GET", f"/jobs/{_quoted(job_id)}/logs", limit_s=_FILES_S, kind="text/plain")

    async def upload(self, path: str, tar: bytes) -> UploadResult:
        """Unpack a tar below a folder of the caller's home; a missing folder is created."""
        answer = await self._send("PUT", "/files", content=tar, params={"path": path}, limit_s=_FILES_S)
        return _read(_UPLOAD, answer)

    async def download(self, path: str) -> bytes:
        """Return a file or folder of the caller's home as a tar."""
        return await self._send("GET", "/files", params={"path": path}, limit_s=_FILES_S, kind=_TAR)

    async def change_node(self, node: str, change: str, request: CordonRequest | None = None) -> NodeView:
        """Change a node by `cordon`, `drain` (both with a request) or `undrain`; administrators only."""
        body = None if request is None else request.model_dump(mode="json")
        return _read(_NODEVIEW, await self._send("POST", f"/nodes/{_quoted(node)}/{change}", json=body))

    async def accept_gpu(self, node: str, index: int) -> NodeView:
        """Grant a GPU with faults again; administrators only."""
        return _read(_NODEVIEW, await self._send("POST", f"/nodes/{_quoted(node)}/gpus/{index}/accept"))

    async def nodes(self) -> list[NodeView]:
        """Return every node with its GPUs."""
        return _read(_NODES, await self._send("GET", "/nodes"))

    async def events(self, *, after: int | None = None, limit: int = 100) -> list[EventView]:
        """Return events, oldest first: the newest ones, or the first ones after `after`."""
        params = {"limit": str(limit)} | ({} if after is None else {"after": str(after)})
        return _read(_EVENTS, await self._send("GET", "/events", params=params))

    async def reservations(self) -> list[ReservationView]:
        """Return reservations that have not ended."""
        return _read(_RESERVATIONS, await self._send("GET", "/reservations"))

    async def reserve(self, request: ReservationRequest) -> ReservationView:
        """Reserve GPUs for some users in a period; administrators only."""
        answer = await self._send("POST", "/reservations", json=request.model_dump(mode="json"))
        return _read(_RESERVATION, answer)

    async def cancel_reservation(self, reservation_id: str) -> None:
        """Cancel a reservation; administrators only."""
        await self._send("DELETE", f"/reservations/{_quoted(reservation_id)}")

    async def usage(self, owner: str | None = None) -> list[UsageView]:
        """Return usage and limits of one owner, or of all."""
        params = {} if owner is None else {"owner": owner}
        return _read(_USAGE, await self._send("GET", "/usage", params=params))

    async def destinations(self) -> list[DestinationView]:
        """Return where the caller has notifications sent."""
        return _read(_DESTINATIONS, await self._send("GET", "/destinations"))

    async def add_destination(self, request: DestinationRequest) -> DestinationView:
        """Add a destination for the caller; a repeated call adds a second one."""
        return _read(_DESTINATION, await self._send("POST", "/destinations", json=request.model_dump(mode="json")))

    async def change_destination(self, key: str, change: DestinationChange) -> DestinationView:
        """Choose other notifications for a destination."""
        path = f"/destinations/{_quoted(key)}"
        return _read(_DESTINATION, await self._send("PUT", path, json=change.model_dump(mode="json")))

    async def delete_destination(self, key: str) -> None:
        """Remove a destination."""
        await self._send("DELETE", f"/destinations/{_quoted(key)}")

    async def test_destination(self, key: str) -> DestinationView:
        """Queue a test message."""
        return _read(_DESTINATION, await self._send("POST", f"/destinations/{_quoted(key)}/test"))

    async def costs(self, owner: str | None = None, limit: int = 20) -> list[CostView]:
        """Return what the running and last jobs and notebooks of one owner, or of all, used."""
        params = {"limit": str(limit)} | ({} if owner is None else {"owner": owner})
        return _read(_COSTS, await self._send("GET", "/costs", params=params))

    async def report(self, by: ReportDimension, **wanted: str) -> ReportView:
        """Return sums of what was used; `since`, `until` (days) and `owner` restrict them."""
        return _read(_REPORT, await self._send("GET", "/costs/report", params={"by": by.value, **wanted}))

    async def cluster(self, groups: Collection[str] = ()) -> ClusterView:
        """Return the state of the whole cluster, for the hub's spawner as a user in these groups sees it."""
        return _read(_CLUSTERVIEW, await self._send("GET", "/cluster", params={"group": sorted(groups)}))

    async def watch_cluster(self, groups: Collection[str] = ()) -> AsyncIterator[ClusterView]:
        """Yield the state of the cluster as users in these groups see it, again whenever it changes.

        Raises:
            GpuhubError: the broker refuses, or does not answer any more.
        """
        async with self._open("/stream/cluster", {"group": sorted(groups)}, _SILENCE_S) as answer:
            async for text in _read_events(answer, "cluster"):
                yield _read(_CLUSTERVIEW, text)

    async def read_own(self) -> OwnView:
        """Return the caller's leases, jobs and usage.

        Raises:
            GpuhubError: the broker refuses, or does not answer.
        """
        async with self._open("/stream/own", {"for_s": "0"}, _ANSWER_S) as answer:
            async for text in _read_events(answer, "own"):
                return _read(_OWNVIEW, text)
        raise errors.BrokerUnreachable("The GPU broker does not answer.")

    async def watch_own(self) -> AsyncIterator[OwnView]:
        """Yield the caller's leases, jobs and usage, again whenever they change.

        Raises:
            GpuhubError: the broker refuses, or does not answer any more.
        """
        async with self._open("/stream/own", {}, _SILENCE_S) as answer:
            async for text in _read_events(answer, "own"):
                yield _read(_OWNVIEW, text)

    async def follow_output(self, job_id: str, tail: int) -> AsyncIterator[bytes]:
        """Yield the last `tail` bytes of the output of the caller's detached job, and what follows until its end.

        Raises:
            GpuhubError: the broker refuses, or does not answer any more.
        """
        params: dict[str, str | list[str]] = {"tail": str(tail), "follow": "true"}
        # A job may write nothing for hours. The first answer may have to start a container.
        async with self._open(f"/jobs/{_quoted(job_id)}/logs", params, None) as answer:
            try:
                async for part in answer.aiter_bytes():
                    yield part
            except httpx.HTTPError as error:
                raise errors.BrokerUnreachable("The connection to the GPU broker has ended.") from error

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
            timeout=httpx.Timeout(_ANSWER_S, read=silence_s),
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

    async def _send(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        params: Mapping[str, str | list[str]] | None = None,
        limit_s: float = _ANSWER_S,
        kind: str = _JSON,
    ) -> bytes:
        """Return the answer; repeat the call, which is idempotent, while the broker does not answer or is busy.

        A call that is refused because of too many requests is repeated when it is allowed again. `content` is the tar
        of an upload, and `kind` the answer's content type.

        Raises:
            BrokerUnreachable: there was no answer within the client's patience.
            TooManyRequests: the call is allowed only after the client's patience.
            GpuhubError: the broker refused the call.
        """
        headers = {"Authorization": self._authorization} | ({} if content is None else {"Content-Type": _TAR})
        request = self._client.build_request(
            method, path, json=json, content=content, params=params, headers=headers, timeout=limit_s
        )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
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


def _poll_params(wait_s: float, version: int | None) -> dict[str, str]:
    """Return the parameters of a long poll for a version other than `version`; none without a version."""
    if version is None:
        return {}
    return {"wait_s": f"{min(max(wait_s, 0.0), 30.0):.3f}", "version": str(version)}


async def _read_events(answer: httpx.Response, kind: str) -> AsyncIterator[bytes]:
    """Yield the data of the server-sent events of one kind."""
    try:
        async for event in httpx_sse.EventSource(answer).aiter_sse():
            if event.event == kind:
                yield event.data.encode()
    except (httpx.HTTPError, httpx_sse.SSEError) as error:
        raise errors.BrokerUnreachable("The connection to the GPU broker has ended.") from error


def _read(kind: TypeAdapter[T], content: bytes) -> T:
    try:
        return kind.validate_json(content)
    except ValidationError as error:
        raise errors.BrokerUnreachable("The GPU broker has another version than this client.") from error


def _quoted(identifier: str) -> str:
    """Return an id or name quoted as one part of a URL's path."""
    return quote(identifier, safe="")
