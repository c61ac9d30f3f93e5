"""A small synchronous client of the broker: jobs and the cluster, nothing else."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, Self

from gpu_launch import wire
from gpu_launch.demand import Demand
from gpu_launch.environment import Environment
from gpu_launch.errors import BrokerError

#: How long a restart of the broker or the hub is waited out.
PATIENCE_S = 60.0
#: A long poll's length; an answer comes at once when something changes.
LONG_POLL_S = 20.0
_ANSWER_S = 15.0  # seconds for an ordinary answer
_RETRY_S = 0.5  # seconds between tries
_RESTARTING = frozenset({502, 503, 504})


def parse_problem(status: int, body: bytes) -> str:
    """The text for the user in a problem document; one line about the status for any other body."""
    try:
        detail = json.loads(body)["detail"]
    except (ValueError, KeyError, TypeError):
        return f"The broker answered with HTTP status {status}."
    return str(detail)


def trust(ca: str, certificate: str, key: str) -> ssl.SSLContext:
    """Trusts the certificates in the file `ca` alone, and shows `certificate` (files, PEM). Raises BrokerError."""
    try:
        context = ssl.create_default_context(cafile=ca)
        context.load_cert_chain(certificate, key)
    except OSError as error:
        reason = error.strerror or error
        raise BrokerError(
            f"This server's certificates cannot be read ({reason}): stop it and start it again."
        ) from None
    return context


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for what it is, an answer: following it would hand the token to whoever it names."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Broker:
    """The broker at `url`, with the notebook's own token, or with a person's.

    On a laptop `url` is `HUB/services/broker`. `tls` says whom to trust; None for the system's own choice.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        patience_s: float = PATIENCE_S,
        on_retry: Callable[[str], None] = lambda text: None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._base = f"{url}/api/v1"
        self._token = token
        self._patience_s = patience_s
        self._on_retry = on_retry
        # A proxy set for the internet is not the way to the head node.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), _NoRedirect, urllib.request.HTTPSHandler(context=tls)
        )

    @classmethod
    def inside(cls, env: Environment, *, patience_s: float = PATIENCE_S) -> Self:
        """The broker of this notebook; one that cannot be asked where the environment tells of none.

        Raises BrokerError where the notebook's certificates cannot be read.
        """
        tls = trust(env.broker_ca, env.certificate, env.key) if env.broker_ca else None
        return cls(env.broker_url or "", env.token or "", patience_s=patience_s, tls=tls)

    def cluster(self) -> wire.Cluster:
        """Every node and GPU."""
        return wire.parse_cluster(self._request("GET", "/cluster"))

    def usage(self) -> list[dict[str, Any]]:
        """What the owner has, had and may have, as the broker tells it."""
        return list(self._request("GET", "/usage"))

    def create_job(
        self,
        *,
        run_id: str,
        nnodes: int,
        nproc_per_node: int,
        server: str,
        exclude_nodes: tuple[str, ...],
        demand: Demand,
        min_nnodes: int | None = None,
        gpus: int | None = None,
        batch: bool = False,
        detached: bool = False,
        profile: str | None = None,
        name: str = "",
        joins: str | None = None,
        first_worker: int = 0,
        given_up: threading.Event | None = None,
    ) -> wire.Job:
        """Ask for workers: `nnodes` of them, or at least `min_nnodes`; or for `gpus` GPUs on any nodes. A repeated
        `run_id` gives the same job.

        `detached`: nobody renews it, and it ends with worker 0. `joins`: its workers are further ones of that run,
        numbered from `first_worker`. `profile`: whose image they run. Not tried again once `given_up` is set.
        """
        body = demand.body() | {
            "run_id": run_id,
            "nnodes": nnodes,
            "nproc_per_node": nproc_per_node,
            "server": server,
            "exclude_nodes": list(exclude_nodes),
        }
        chosen = {
            "min_nnodes": min_nnodes,
            "gpus": gpus,
            "batch": batch,
            "detached": detached,
            "profile": profile,
            "name": name,
            "joins": joins,
            "first_worker": first_worker,
        }
        # Only what differs from the defaults: an older broker refuses fields that it does not know.
        body |= {field: value for field, value in chosen.items() if value not in (None, "", 0, False)}
        return wire.parse_job(self._request("POST", "/jobs", body=body, given_up=given_up))

    def jobs(self, *, ended: bool = False) -> list[wire.Job]:
        """The owner's jobs; with `ended` also those that ended lately, newest first."""
        return [wire.parse_job(job) for job in self._request("GET", "/jobs?ended=true" if ended else "/jobs")]

    def job(self, job_id: str, *, version: int | None = None, wait_s: float = LONG_POLL_S) -> wire.Job:
        """The job now; with `version`, as soon as it differs from that version, at most after `wait_s`."""
        query = "" if version is None else f"?wait_s={wait_s:g}&version={version}"
        return wire.parse_job(self._request("GET", f"/jobs/{_quote(job_id)}{query}", answer_s=_ANSWER_S + wait_s))

    def renew(self, job_id: str) -> None:
        """Say that the job's owner is still there."""
        self._request("POST", f"/jobs/{_quote(job_id)}/renew")

    def delete_job(self, job_id: str) -> wire.Job:
        """Stop the job; its GPUs are free when it is `ended`."""
        return wire.parse_job(self._request("DELETE", f"/jobs/{_quote(job_id)}"))

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        answer_s: float = _ANSWER_S,
        given_up: threading.Event | None = None,
    ) -> Any:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return self._once(method, path, body, answer_s)
            except BrokerError as error:
                if error.status is not None and error.status not in _RESTARTING:
                    raise
                if time.monotonic() + _RETRY_S > deadline or (given_up is not None and given_up.is_set()):
                    raise
                self._on_retry("the broker does not answer; trying again")
            time.sleep(_RETRY_S)

    def _once(self, method: str, path: str, body: Any, answer_s: float) -> Any:
        request = urllib.request.Request(  # noqa: S310 - the URL comes from the container's own environment
            self._base + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self._token}", "Content-Type": "application/json"},
        )
        try:
            with self._opener.open(request, timeout=answer_s) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise BrokerError(parse_problem(error.code, error.read()), status=error.code) from None
        except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise BrokerError(f"The broker at {self._base} cannot be reached: {reason}.") from None
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise BrokerError(f"What answers at {self._base} is not the broker: its answer is no JSON.") from None


def _quote(text: str) -> str:
    return urllib.parse.quote(text, safe="")
