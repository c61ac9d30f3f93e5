"""Async client of the broker for the hub and the head node's commands, with a method for each route that they use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from urllib.parse import quote

from gpuhub.broker_api.connection import ANSWER_S, TAR, BrokerConnection, parse_answer, read_events
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
    OutputShareView,
    PendingReasonView,
    PowerRequest,
    ReclaimAnswer,
    ReclaimRequest,
    ReportDimension,
    ReportView,
    ReservationRequest,
    ReservationView,
    ShareRequest,
    StagingView,
    UploadResult,
    UsageView,
    VisitView,
)
from gpuhub.broker_api.schemas.bench import BenchView
from gpuhub.broker_api.schemas.limits import UserLimitsRequest, UserLimitsView
from gpuhub.broker_api.schemas.live import OwnView, SharedJobView
from gpuhub.broker_api.schemas.output_shares import SharedNotebookView
from gpuhub.broker_api.schemas.services import ServiceView
from gpuhub.common import errors

#: Time limit of an answer with or after a file transfer, which may first start a container on a node; seconds.
_FILES_S = 120.0
#: Maximum silence of a stream, seconds: the broker sends a comment every 15 s.
_SILENCE_S = 45.0


class AsyncBrokerClient(BrokerConnection):
    """Client of the broker; calls raise the errors that the broker reports."""

    async def request_lease(self, request: LeaseRequest) -> LeaseView:
        """Request a lease; a repeated request returns the same one."""
        return parse_answer(LeaseView, await self._send("POST", "/leases", json=request.model_dump(mode="json")))

    async def leases(self, **wanted: str) -> list[LeaseView]:
        """Return leases that have not ended; `owner`, `state` and `node` filter them."""
        return parse_answer(list[LeaseView], await self._send("GET", "/leases", params=wanted))

    async def get_lease(self, lease_id: str, *, wait_s: float = 0, version: int | None = None) -> LeaseView:
        """Return one lease; with `version` as soon as its version differs, at the latest after `wait_s` seconds."""
        params = _poll_params(wait_s, version)
        path = f"/leases/{_quoted(lease_id)}"
        return parse_answer(LeaseView, await self._send("GET", path, params=params, limit_s=ANSWER_S + wait_s))

    async def activate(self, lease_id: str, container_id: str) -> LeaseView:
        """Report that the container exists; it may be started when this returns."""
        body = ActivationRequest(container_id=container_id).model_dump(mode="json")
        return parse_answer(LeaseView, await self._send("POST", f"/leases/{_quoted(lease_id)}/activate", json=body))

    async def stage(self, lease_id: str, *, wait_s: float = 0) -> StagingView:
        """Copy the datasets of a granted lease to its node, and return how far that is after `wait_s` at the latest."""
        path, params = f"/leases/{_quoted(lease_id)}/stage", {"wait_s": f"{wait_s:.3f}"}
        return parse_answer(StagingView, await self._send("POST", path, params=params, limit_s=ANSWER_S + wait_s))

    async def release(self, lease_id: str) -> LeaseView:
        """Release a lease."""
        return parse_answer(LeaseView, await self._send("DELETE", f"/leases/{_quoted(lease_id)}"))

    async def release_all(self, owner: str) -> int:
        """Release all leases of a user, those of jobs too; return their number."""
        leases = await self.leases(owner=owner)
        await asyncio.gather(*(self.release(lease.id) for lease in leases))
        return len(leases)

    async def why(self, lease_id: str) -> PendingReasonView:
        """Return all reasons why a request waits."""
        return parse_answer(PendingReasonView, await self._send("GET", f"/leases/{_quoted(lease_id)}/why"))

    async def extend(self, lease_id: str, time_limit_s: int) -> LeaseView:
        """Extend a lease, so that it ends `time_limit_s` seconds from now."""
        body = ExtensionRequest(time_limit_s=time_limit_s).model_dump(mode="json")
        return parse_answer(LeaseView, await self._send("POST", f"/leases/{_quoted(lease_id)}/extend", json=body))

    async def force(self, lease_id: str) -> LeaseView:
        """Free a lease's GPUs without proof; administrators only."""
        return parse_answer(LeaseView, await self._send("POST", f"/leases/{_quoted(lease_id)}/force"))

    async def suspend(self, lease_id: str) -> LeaseView:
        """Move a notebook's GPU memory into host memory; see `POST /leases/{id}/suspend`."""
        return parse_answer(LeaseView, await self._send("POST", f"/leases/{_quoted(lease_id)}/suspend"))

    async def resume(self, lease_id: str) -> LeaseView:
        """Let a suspended notebook wait for its GPU."""
        return parse_answer(LeaseView, await self._send("POST", f"/leases/{_quoted(lease_id)}/resume"))

    async def keep(self, lease_id: str) -> LeaseView:
        """Keep an idle notebook."""
        return parse_answer(LeaseView, await self._send("POST", f"/leases/{_quoted(lease_id)}/keep"))

    async def reclaim(self, owner: str, server: str) -> bool:
        """Return whether the hub's culler should stop a notebook now."""
        body = ReclaimRequest(owner=owner, server=server).model_dump(mode="json")
        return parse_answer(ReclaimAnswer, await self._send("POST", "/reclaims", json=body)).stop

    async def request_job(self, request: JobRequest) -> JobView:
        """Request workers, all or none; a run that has a job already gets that one."""
        return parse_answer(JobView, await self._send("POST", "/jobs", json=request.model_dump(mode="json")))

    async def jobs(self) -> list[JobView]:
        """Return jobs that have not ended: the caller's own, or all for an administrator."""
        return parse_answer(list[JobView], await self._send("GET", "/jobs"))

    async def get_job(self, job_id: str, *, wait_s: float = 0, version: int | None = None) -> JobView:
        """Return one job; with `version` as soon as its version differs, at the latest after `wait_s` seconds."""
        params = _poll_params(wait_s, version)
        path = f"/jobs/{_quoted(job_id)}"
        return parse_answer(JobView, await self._send("GET", path, params=params, limit_s=ANSWER_S + wait_s))

    async def end_job(self, job_id: str) -> JobView:
        """Stop a job; its GPUs are free when its state is `ended`."""
        return parse_answer(JobView, await self._send("DELETE", f"/jobs/{_quoted(job_id)}"))

    async def open_visit(self, job_id: str) -> VisitView:
        """Open a visit of the caller's browser to a job's server."""
        return parse_answer(VisitView, await self._send("POST", f"/jobs/{_quoted(job_id)}/visits"))

    async def services(self) -> list[ServiceView]:
        """Return the services that the caller may use; all for administrators."""
        return parse_answer(list[ServiceView], await self._send("GET", "/services"))

    async def restart_service(self, name: str) -> ServiceView:
        """Replace the containers of a service; administrators only."""
        answer = await self._send("POST", f"/services/{_quoted(name)}/restart", limit_s=_FILES_S)
        return parse_answer(ServiceView, answer)

    async def read_service_log(self, name: str, lines: int) -> bytes:
        """Return the last lines of a service's output; administrators only."""
        path, params = f"/services/{_quoted(name)}/logs", {"lines": str(lines)}
        return await self._send("GET", path, params=params, limit_s=_FILES_S, kind="text/plain")

    async def open_service_visit(self, name: str) -> VisitView:
        """Open a visit of the caller's browser to a service."""
        return parse_answer(VisitView, await self._send("POST", f"/services/{_quoted(name)}/visits"))

    async def read_job_output(self, job_id: str) -> bytes:
        """Return the output that the caller's detached job has written so far."""
        return await self._send("GET", f"/jobs/{_quoted(job_id)}/logs", limit_s=_FILES_S, kind="text/plain")

    async def upload(self, path: str, tar: bytes) -> UploadResult:
        """Unpack a tar below a folder of the caller's home; a missing folder is created."""
        answer = await self._send("PUT", "/files", content=tar, params={"path": path}, limit_s=_FILES_S)
        return parse_answer(UploadResult, answer)

    async def download(self, path: str) -> bytes:
        """Return a file or folder of the caller's home as a tar."""
        return await self._send("GET", "/files", params={"path": path}, limit_s=_FILES_S, kind=TAR)

    async def change_node(self, node: str, change: str, request: CordonRequest | None = None) -> NodeView:
        """Change a node by `cordon`, `drain` (both with a request) or `undrain`; administrators only."""
        body = None if request is None else request.model_dump(mode="json")
        return parse_answer(NodeView, await self._send("POST", f"/nodes/{_quoted(node)}/{change}", json=body))

    async def accept_gpu(self, node: str, index: int) -> NodeView:
        """Grant a GPU with faults again; administrators only."""
        return parse_answer(NodeView, await self._send("POST", f"/nodes/{_quoted(node)}/gpus/{index}/accept"))

    async def switch_power(self, node: str, *, on: bool) -> NodeView:
        """Wake a node, or put it to sleep; administrators only."""
        body = PowerRequest(on=on).model_dump(mode="json")
        return parse_answer(NodeView, await self._send("POST", f"/nodes/{_quoted(node)}/power", json=body))

    async def nodes(self) -> list[NodeView]:
        """Return every node with its GPUs."""
        return parse_answer(list[NodeView], await self._send("GET", "/nodes"))

    async def bench(self) -> BenchView:
        """Return what `gpuhub bench` last measured."""
        return parse_answer(BenchView, await self._send("GET", "/bench"))

    async def save_bench(self, bench: BenchView) -> BenchView:
        """Keep what was measured; administrators only."""
        return parse_answer(BenchView, await self._send("PUT", "/bench", json=bench.model_dump(mode="json")))

    async def events(self, *, after: int | None = None, limit: int = 100) -> list[EventView]:
        """Return events, oldest first: the newest ones, or the first ones after `after`."""
        params = {"limit": str(limit)} | ({} if after is None else {"after": str(after)})
        return parse_answer(list[EventView], await self._send("GET", "/events", params=params))

    async def reservations(self) -> list[ReservationView]:
        """Return reservations that have not ended."""
        return parse_answer(list[ReservationView], await self._send("GET", "/reservations"))

    async def reserve(self, request: ReservationRequest) -> ReservationView:
        """Reserve GPUs for some users in a period; administrators only."""
        answer = await self._send("POST", "/reservations", json=request.model_dump(mode="json"))
        return parse_answer(ReservationView, answer)

    async def cancel_reservation(self, reservation_id: str) -> None:
        """Cancel a reservation; administrators only."""
        await self._send("DELETE", f"/reservations/{_quoted(reservation_id)}")

    async def limits(self) -> list[UserLimitsView]:
        """Return the limits that were set for single users; administrators only."""
        return parse_answer(list[UserLimitsView], await self._send("GET", "/limits"))

    async def set_limits(self, owner: str, request: UserLimitsRequest) -> UserLimitsView:
        """Set a user's limits in place of those of cluster.toml; administrators only."""
        answer = await self._send("PUT", f"/limits/{_quoted(owner)}", json=request.model_dump(mode="json"))
        return parse_answer(UserLimitsView, answer)

    async def clear_limits(self, owner: str) -> None:
        """Give a user the limits of cluster.toml back; administrators only."""
        await self._send("DELETE", f"/limits/{_quoted(owner)}")

    async def usage(self, owner: str | None = None) -> list[UsageView]:
        """Return usage and limits of one owner, or of all."""
        params = {} if owner is None else {"owner": owner}
        return parse_answer(list[UsageView], await self._send("GET", "/usage", params=params))

    async def destinations(self) -> list[DestinationView]:
        """Return the caller's destinations of notifications."""
        return parse_answer(list[DestinationView], await self._send("GET", "/destinations"))

    async def add_destination(self, request: DestinationRequest) -> DestinationView:
        """Add a destination for the caller; a repeated call adds a second one."""
        return parse_answer(
            DestinationView, await self._send("POST", "/destinations", json=request.model_dump(mode="json"))
        )

    async def change_destination(self, key: str, change: DestinationChange) -> DestinationView:
        """Choose other notifications for a destination."""
        path = f"/destinations/{_quoted(key)}"
        return parse_answer(DestinationView, await self._send("PUT", path, json=change.model_dump(mode="json")))

    async def delete_destination(self, key: str) -> None:
        """Remove a destination."""
        await self._send("DELETE", f"/destinations/{_quoted(key)}")

    async def test_destination(self, key: str) -> DestinationView:
        """Queue a test message."""
        return parse_answer(DestinationView, await self._send("POST", f"/destinations/{_quoted(key)}/test"))

    async def costs(self, owner: str | None = None, limit: int = 20) -> list[CostView]:
        """Return what the running and last jobs and notebooks of one owner, or of all, used."""
        params = {"limit": str(limit)} | ({} if owner is None else {"owner": owner})
        return parse_answer(list[CostView], await self._send("GET", "/costs", params=params))

    async def report(self, by: ReportDimension, **wanted: str) -> ReportView:
        """Return sums of what was used; `since`, `until` (days) and `owner` restrict them."""
        return parse_answer(ReportView, await self._send("GET", "/costs/report", params={"by": by.value, **wanted}))

    async def cluster(self, groups: Collection[str] = ()) -> ClusterView:
        """Return the state of the whole cluster, for the hub's spawner as a user in these groups sees it."""
        return parse_answer(ClusterView, await self._send("GET", "/cluster", params={"group": sorted(groups)}))

    async def watch_cluster(self, groups: Collection[str] = ()) -> AsyncIterator[ClusterView]:
        """Yield the state of the cluster as users in these groups see it, again whenever it changes.

        Raises:
            GpuhubError: the broker refuses, or does not answer any more.
        """
        async with self._open("/stream/cluster", {"group": sorted(groups)}, _SILENCE_S) as answer:
            async for text in read_events(answer, "cluster"):
                yield parse_answer(ClusterView, text)

    async def read_own(self) -> OwnView:
        """Return the caller's leases, jobs and usage.

        Raises:
            GpuhubError: the broker refuses, or does not answer.
        """
        async with self._open("/stream/own", {"for_s": "0"}, ANSWER_S) as answer:
            async for text in read_events(answer, "own"):
                return parse_answer(OwnView, text)
        raise errors.BrokerUnreachable("The GPU broker does not answer.")

    async def watch_own(self) -> AsyncIterator[OwnView]:
        """Yield the caller's leases, jobs and usage, again whenever they change.

        Raises:
            GpuhubError: the broker refuses, or does not answer any more.
        """
        async with self._open("/stream/own", {}, _SILENCE_S) as answer:
            async for text in read_events(answer, "own"):
                yield parse_answer(OwnView, text)

    async def shares(self) -> list[OutputShareView]:
        """Return output shares: the caller's own and those with the caller, or all for an administrator and the hub."""
        return parse_answer(list[OutputShareView], await self._send("GET", "/shares"))

    async def end_shares(self, job_id: str, viewer: str) -> list[OutputShareView]:
        """End the share of the caller's job with a user; return it, or nothing if there was none."""
        return parse_answer(
            list[OutputShareView], await self._send("DELETE", f"/jobs/{_quoted(job_id)}/shares/{_quoted(viewer)}")
        )

    async def end_shares_of_user(self, user: str) -> list[OutputShareView]:
        """End all shares of a user and with a user, and return them; for the hub and administrators only."""
        return parse_answer(list[OutputShareView], await self._send("DELETE", "/shares", params={"user": user}))

    async def share_output(self, job_id: str, viewer: str, for_s: int) -> OutputShareView:
        """Share the output of the caller's job with a user for `for_s` seconds from now."""
        path, body = f"/jobs/{_quoted(job_id)}/shares/{_quoted(viewer)}", ShareRequest(for_s=for_s)
        return parse_answer(OutputShareView, await self._send("PUT", path, json=body.model_dump(mode="json")))

    async def end_notebook_shares(self, notebook_id: str, viewer: str) -> list[OutputShareView]:
        """End the share of the caller's notebook with a user; return it, or nothing if there was none."""
        path = f"/notebooks/{_quoted(notebook_id)}/shares/{_quoted(viewer)}"
        return parse_answer(list[OutputShareView], await self._send("DELETE", path))

    async def read_shared_notebook(self, notebook_id: str) -> SharedNotebookView:
        """Return a notebook that is shared with the caller, and when it was saved."""
        return parse_answer(SharedNotebookView, await self._send("GET", f"/shared/notebooks/{_quoted(notebook_id)}"))

    async def render_shared_notebook(self, notebook_id: str) -> AsyncIterator[bytes]:
        """Yield the page of a notebook that is shared with the caller, of which nothing may be trusted.

        Raises:
            GpuhubError: the broker refuses, or does not answer any more, as when the share ends.
        """
        async for part in self._read_parts(f"/shared/notebooks/{_quoted(notebook_id)}/html", {}, _FILES_S):
            yield part

    async def read_shared_job(self, job_id: str) -> SharedJobView:
        """Return a job that is shared with the caller.

        Raises:
            GpuhubError: the broker refuses, or does not answer.
        """
        async with self._open(f"/stream/shared/{_quoted(job_id)}", {"for_s": "0"}, ANSWER_S) as answer:
            async for text in read_events(answer, "shared"):
                return parse_answer(SharedJobView, text)
        raise errors.BrokerUnreachable("The GPU broker does not answer.")

    async def watch_shared_job(self, job_id: str) -> AsyncIterator[SharedJobView]:
        """Yield a job that is shared with the caller, again whenever it changes.

        Raises:
            GpuhubError: the broker refuses, or does not answer any more.
        """
        async with self._open(f"/stream/shared/{_quoted(job_id)}", {}, _SILENCE_S) as answer:
            async for text in read_events(answer, "shared"):
                yield parse_answer(SharedJobView, text)

    def follow_output(self, job_id: str, tail: int) -> AsyncIterator[bytes]:
        """Yield the last `tail` bytes of the output of the caller's detached job, and what follows until its end.

        Raises:
            GpuhubError: the broker refuses, or does not answer any more.
        """
        return self._follow(f"/jobs/{_quoted(job_id)}/logs", tail)

    def follow_shared_output(self, job_id: str, tail: int) -> AsyncIterator[bytes]:
        """Yield the last `tail` bytes of the output of a job that is shared with the caller, and what follows.

        Raises:
            GpuhubError: the broker refuses, or does not answer any more, as when the share ends.
        """
        return self._follow(f"/shared/{_quoted(job_id)}/logs", tail)

    async def _follow(self, path: str, tail: int) -> AsyncIterator[bytes]:
        # A job may write nothing for hours. The first answer may have to start a container.
        async for part in self._read_parts(path, {"tail": str(tail), "follow": "true"}, None):
            yield part


def _poll_params(wait_s: float, version: int | None) -> dict[str, str]:
    """Return the parameters of a long poll for a version other than `version`; none without a version."""
    if version is None:
        return {}
    return {"wait_s": f"{min(max(wait_s, 0.0), 30.0):.3f}", "version": str(version)}


def _quoted(identifier: str) -> str:
    """Return an id or name quoted as one part of a URL's path."""
    return quote(identifier, safe="")
