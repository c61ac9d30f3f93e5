"""A synchronous client of the broker for jobs and the cluster."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Self

from gpu_launch.broker import models
from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.broker.problems import build_error, name_options
from gpu_launch.common.client_tls import load_own_tls
from gpu_launch.environment import Environment
from gpu_launch.errors import BrokerError

_QUERY_RETRY_LIMIT_S = 3.0  # seconds that a query of the notebook waits for a broker that restarts
#: Maximum wait for a restart of the broker or the hub, seconds.
RETRY_LIMIT_S = 60.0
#: Length of a long poll, seconds; a change is answered at once.
LONG_POLL_S = 20.0
_ANSWER_TIMEOUT_S = 15.0  # seconds for an ordinary answer
_RETRY_S = 0.5  # seconds between tries
_RESTARTING = frozenset({502, 503, 504})


class BrokerClient:
    """A client with a notebook's or a user's token.

    On a laptop `url` is `HUB/services/broker`. Without `tls` the system's certificates are trusted. `hub_url` is an
    address of the hub for browsers, empty if it is not known.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        retry_limit_s: float = RETRY_LIMIT_S,
        on_retry: Callable[[str], None] = lambda text: None,
        tls: ssl.SSLContext | None = None,
        hub_url: str = "",
    ) -> None:
        self._base = f"{url}/api/v1"
        self._hub_url = hub_url
        self._token = token
        self._retry_limit_s = retry_limit_s
        self._on_retry = on_retry
        # A proxy for the internet does not lead to the head node.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), NoRedirect, urllib.request.HTTPSHandler(context=tls)
        )

    @classmethod
    def for_notebook(cls, env: Environment, *, retry_limit_s: float = RETRY_LIMIT_S) -> Self:
        """Return the client of this notebook; its requests fail if the environment names no broker.

        Raises:
            BrokerError: The notebook's certificates cannot be read.
        """
        tls = load_own_tls(env)
        return cls(env.broker_url or "", env.token or "", retry_limit_s=retry_limit_s, tls=tls, hub_url=env.hub_url)

    def get_cluster(self) -> models.Cluster:
        """Return all nodes and GPUs."""
        return models.parse_cluster(self.get_cluster_view())

    def get_cluster_view(self) -> dict[str, Any]:
        """Return all nodes, GPUs and the queue in the broker's format."""
        return dict(self._request("GET", "/cluster"))

    def get_usage(self) -> list[dict[str, Any]]:
        """Return the owners' usage and quotas in the broker's format."""
        return list(self._request("GET", "/usage"))

    def get_bench(self) -> dict[str, Any] | None:
        """Return what the cluster's administrator measured with `gpuhub bench`; None without a measurement."""
        try:
            return dict(self._request("GET", "/bench"))
        except BrokerError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    def list_recipes(self) -> list[dict[str, Any]]:
        """Return the lab's own recipes in the broker's format: `name`, and the file as `text`."""
        return list(self._request("GET", "/recipes"))

    def create_job(
        self,
        *,
        run_id: str,
        nnodes: int,
        nproc_per_node: int,
        server: str,
        exclude_nodes: tuple[str, ...],
        demand: GpuRequest,
        min_nnodes: int | None = None,
        gpus: int | None = None,
        batch: bool = False,
        detached: bool = False,
        profile: str | None = None,
        image: str | None = None,
        name: str = "",
        joins: str | None = None,
        first_worker: int = 0,
        after: str | None = None,
        max_retries: int = 0,
        sleeps: bool = False,
        port: int | None = None,
        port_users: tuple[str, ...] = (),
        cancelled: threading.Event | None = None,
    ) -> models.Job:
        """Request workers for a job; a repeated `run_id` returns the same job.

        Args:
            run_id: The run's id.
            nnodes: Number of workers.
            nproc_per_node: GPUs of each worker.
            server: Name of the notebook server.
            exclude_nodes: Nodes without a worker.
            demand: Properties of the GPUs.
            min_nnodes: Least number of workers for an elastic job.
            gpus: Total number of GPUs on any nodes, instead of `nnodes`.
            batch: All workers start together.
            detached: The job is not renewed and ends with worker 0.
            profile: The profile whose image the workers use.
            image: The workers' image, if not the profile's own.
            name: A name for people.
            joins: The run that the workers join.
            first_worker: Index of the first worker that joins.
            after: The run, or array, that must succeed before.
            max_retries: Number of times that a detached job starts again after a failure.
            sleeps: When it ends by itself and well, it starts again at the next request to its port.
            port: Port of a server in worker 0 of a detached job, which is reached through the hub.
            port_users: Users who reach the port besides the owner.
            cancelled: Once set, the request is not repeated.
        """
        body = _build_job_request(
            demand,
            run_id=run_id,
            nnodes=nnodes,
            nproc_per_node=nproc_per_node,
            server=server,
            exclude_nodes=exclude_nodes,
            min_nnodes=min_nnodes,
            gpus=gpus,
            batch=batch,
            detached=detached,
            profile=profile,
            image=image,
            name=name,
            joins=joins,
            first_worker=first_worker,
            after=after,
            max_retries=max_retries,
            sleeps=sleeps,
            port=port,
            port_users=list(port_users),
        )
        return models.parse_job(self._request_jobs("/jobs", body, cancelled))

    def create_array(
        self, *, count: int, demand: GpuRequest, max_running: int | None = None, **job: Any
    ) -> list[models.Job]:
        """Request an array of `count` tasks, each a job of one GPU, with run ids `RUN-0`, `RUN-1`, …

        `max_running` of them wait for GPUs or run at the same time; None for all.
        `job` has the other arguments of `create_job`. A repeated `run_id` returns the same jobs.
        """
        body = {"job": _build_job_request(demand, **job), "count": count}
        if max_running is not None:
            body["max_running"] = max_running
        return [models.parse_job(task) for task in self._request_jobs("/jobs/arrays", body)]

    def create_group(
        self, run_id: str, jobs: Sequence[Mapping[str, Any]], auxiliary: Mapping[str, int]
    ) -> list[models.Job]:
        """Request a job group, whose jobs get their GPUs at the same moment; all are accepted, or none.

        Each of `jobs` has the arguments of `create_job`; `auxiliary` has the seconds that some of them run on when all
        others have ended, by run id. Repeated run ids return the same jobs.
        """
        body: dict[str, Any] = {"run_id": run_id, "jobs": [_build_job_request(**job) for job in jobs]}
        if auxiliary:
            body["auxiliary"] = dict(auxiliary)
        return [models.parse_job(job) for job in self._request_jobs("/jobs/groups", body)]

    def check_job(
        self, *, count: int | None, demand: GpuRequest, others: Sequence[Mapping[str, Any]] = (), **job: Any
    ) -> None:
        """Refuse what `create_job`, `create_array` of `count` tasks or `create_group` would be refused for.

        Nothing is created. `job` has the other arguments of `create_job`, and `others` those of the further jobs of a
        job group. A broker of an earlier version checks nothing.
        """
        body: dict[str, Any] = {"job": _build_job_request(demand, **job), "count": count}
        if others:
            body["others"] = [_build_job_request(**other) for other in others]
        try:
            self._request_jobs("/jobs/check", body)
        except BrokerError as error:
            if error.status != HTTPStatus.METHOD_NOT_ALLOWED:
                raise

    def list_jobs(self, *, ended: bool = False) -> list[models.Job]:
        """Return the owner's jobs, newest first; with `ended` also those that ended recently."""
        return [models.parse_job(job) for job in self.list_job_views(ended=ended)]

    def list_job_views(self, *, ended: bool = False) -> list[dict[str, Any]]:
        """Return what `list_jobs` does, in the broker's format."""
        return list(self._request("GET", "/jobs?ended=true" if ended else "/jobs"))

    def list_leases(self) -> list[models.Lease]:
        """Return the owner's leases that have not ended, of notebooks and jobs."""
        return [models.parse_lease(lease) for lease in self._request("GET", "/leases")]

    def get_lease(self, lease_id: str, *, version: int | None = None, wait_s: float = LONG_POLL_S) -> models.Lease:
        """Return a lease; with `version`, as soon as it differs, after `wait_s` seconds at most."""
        query = "" if version is None else f"?wait_s={wait_s:g}&version={version}"
        return models.parse_lease(
            self._request("GET", f"/leases/{_quote(lease_id)}{query}", answer_s=_ANSWER_TIMEOUT_S + wait_s)
        )

    def get_lease_view(self, lease_id: str) -> dict[str, Any]:
        """Return a lease in the broker's format."""
        return dict(self._request("GET", f"/leases/{_quote(lease_id)}"))

    def extend_lease(self, lease_id: str, time_limit_s: int) -> models.Lease:
        """Let a lease end in `time_limit_s` seconds."""
        body = {"time_limit_s": time_limit_s}
        return models.parse_lease(self._request("POST", f"/leases/{_quote(lease_id)}/extend", body=body))

    def suspend_notebook(self, lease_id: str) -> None:
        """Move a notebook's GPU memory into host memory, so that others can have its GPU."""
        self._request("POST", f"/leases/{_quote(lease_id)}/suspend")

    def resume_notebook(self, lease_id: str) -> None:
        """Let a suspended notebook wait for its GPU."""
        self._request("POST", f"/leases/{_quote(lease_id)}/resume")

    def get_job(self, job_id: str, *, version: int | None = None, wait_s: float = LONG_POLL_S) -> models.Job:
        """Return the job; with `version`, as soon as it differs from that version, after `wait_s` seconds at most."""
        query = "" if version is None else f"?wait_s={wait_s:g}&version={version}"
        return models.parse_job(
            self._request("GET", f"/jobs/{_quote(job_id)}{query}", answer_s=_ANSWER_TIMEOUT_S + wait_s)
        )

    def renew_job(self, job_id: str) -> None:
        """Report that the job's owner is still active."""
        self._request("POST", f"/jobs/{_quote(job_id)}/renew")

    def report_activity(
        self, lease_id: str, *, is_busy: bool, inactive_s: float, last_cell_s: float | None = None
    ) -> dict[str, Any]:
        """Report what happens in a notebook; return the broker's `ActivityAnswer`."""
        body = {"is_busy": is_busy, "inactive_s": inactive_s, "last_cell_s": last_cell_s}
        return dict(self._request("POST", f"/leases/{_quote(lease_id)}/activity", body=body))

    def keep_notebook(self, lease_id: str) -> dict[str, Any] | None:
        """Keep an idle notebook; return its idle state in the broker's format."""
        idle = self._request("POST", f"/leases/{_quote(lease_id)}/keep")["idle"]
        return None if idle is None else dict(idle)

    def list_notifications(self, *, after: int | None) -> list[dict[str, Any]]:
        """Return the user's notifications after a number, or the newest ones, oldest first, in the broker's format."""
        query = "" if after is None else f"?after={after}"
        return [dict(row) for row in self._request("GET", f"/notifications{query}")]

    def delete_job(self, job_id: str) -> models.Job:
        """Stop the job; its GPUs are free when it is `ended`."""
        return models.parse_job(self._request("DELETE", f"/jobs/{_quote(job_id)}"))

    def share_output(self, job_id: str, viewer: str, for_s: int) -> dict[str, Any]:
        """Share the output of a detached job with a user for `for_s` seconds; return it in the broker's format."""
        path = f"/jobs/{_quote(job_id)}/shares/{_quote(viewer)}"
        return dict(self._request("PUT", path, body={"for_s": for_s}))

    def end_shares(self, job_id: str, viewer: str | None = None) -> list[dict[str, Any]]:
        """End the shares of a job, or the one with a user; return those that there were, in the broker's format."""
        one = "" if viewer is None else f"/{_quote(viewer)}"
        return [dict(share) for share in self._request("DELETE", f"/jobs/{_quote(job_id)}/shares{one}")]

    def share_notebook(self, path: str, viewer: str, for_s: int) -> dict[str, Any]:
        """Share a saved notebook of the home with a user for `for_s` seconds; return it in the broker's format."""
        body = {"path": path, "for_s": for_s}
        return dict(self._request("PUT", f"/notebooks/shares/{_quote(viewer)}", body=body))

    def end_notebook_shares(self, subject: str, viewer: str | None = None) -> list[dict[str, Any]]:
        """End the shares of a notebook, or the one with a user; return those that there were."""
        one = "" if viewer is None else f"/{_quote(viewer)}"
        return [dict(share) for share in self._request("DELETE", f"/notebooks/{_quote(subject)}/shares{one}")]

    def list_shares(self) -> list[dict[str, Any]]:
        """Return the outputs that the user shares, and those shared with the user, in the broker's format."""
        return [dict(share) for share in self._request("GET", "/shares")]

    def _request_jobs(self, path: str, body: dict[str, Any], cancelled: threading.Event | None = None) -> Any:
        try:
            return self._request("POST", path, body=body, given_up=cancelled)
        except BrokerError as error:
            error.args = (name_options(str(error)),)
            raise

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        answer_s: float = _ANSWER_TIMEOUT_S,
        given_up: threading.Event | None = None,
    ) -> Any:
        deadline = time.monotonic() + self._retry_limit_s
        while True:
            pause_s, reason = _RETRY_S, "the broker does not answer; trying again"
            try:
                return self._send(method, path, body, answer_s)
            except BrokerError as error:
                if error.retry_after_s is not None:
                    pause_s, reason = error.retry_after_s, str(error)
                elif error.status is not None and error.status not in _RESTARTING:
                    raise
                if time.monotonic() + pause_s > deadline or (given_up is not None and given_up.is_set()):
                    raise
                self._on_retry(reason)
                if (given_up or threading.Event()).wait(pause_s):
                    raise

    def _send(self, method: str, path: str, body: Any, answer_s: float) -> Any:
        request = urllib.request.Request(  # noqa: S310 - the URL comes from the container's own environment
            self._base + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self._token}", "Content-Type": "application/json"},
        )
        try:
            with self._opener.open(request, timeout=answer_s) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            with error:
                retry_after = error.headers.get("Retry-After")
                raise build_error(error.code, error.read(), self._hub_url, retry_after) from None
        except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise BrokerError(f"The broker at {self._base} cannot be reached: {reason}.") from None
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise BrokerError(
                f"The answer from {self._base} is not JSON, so this is not the broker: check the URL."
            ) from None


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as an answer: following it would send the token to the redirect's target."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _build_job_request(demand: GpuRequest, *, exclude_nodes: tuple[str, ...], **values: Any) -> dict[str, Any]:
    required = ("run_id", "nnodes", "nproc_per_node", "server")
    # Only values that differ from the defaults, because an older broker refuses unknown fields.
    given = {name: value for name, value in values.items() if name in required or value not in (None, "", 0, False, [])}
    return demand.build_body() | given | {"exclude_nodes": list(exclude_nodes)}


def _quote(text: str) -> str:
    return urllib.parse.quote(text, safe="")


def build_broker(env: Environment) -> BrokerClient | None:
    """Return the client of this server's broker, None if it has no broker."""
    return BrokerClient.for_notebook(env, retry_limit_s=_QUERY_RETRY_LIMIT_S) if env.broker_url and env.token else None
