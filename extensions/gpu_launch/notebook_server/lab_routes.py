"""The routes of gpuhub's JupyterLab extension, below the server's own address and behind its login.

`GET gpuhub/overview` has what `overview` builds, `POST gpuhub/extend` gives the notebook more time,
`POST` and `DELETE gpuhub/suspension` lend its GPU and ask for it again,
`DELETE gpuhub/jobs/ID` ends a job, `GET gpuhub/runs/RUN/log` has the end of a run's output, and `POST gpuhub/shares`
lets a colleague read a notebook. The notebook's token stays in the server. A failure is `{"message": text}`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from jupyter_server.base.handlers import APIHandler
from tornado import web

from gpu_launch.broker.client import BrokerClient
from gpu_launch.common import run_folder
from gpu_launch.environment import Environment
from gpu_launch.errors import BrokerError, UsageError
from gpu_launch.notebook_server.overview import SharedReader, build_overview
from gpu_launch.notebook_server.recipe_runner import RecipeRunner
from gpu_launch.output import logs

#: Requests to the broker and reads of log files at the same time; further ones wait.
_THREADS = 4
#: Maximum length of a request of the browser, bytes.
_MAX_BODY_BYTES = 4096
#: The end of the output that is shown, bytes.
_LOG_BYTES = 64 * 1024
_RUN = r"([A-Za-z0-9][A-Za-z0-9_-]{0,63})"


class LabBackend:
    """What the routes do."""

    def __init__(self, broker: BrokerClient, env: Environment, lease: str, root: Path) -> None:
        """`lease` is the id of the notebook's lease, empty if it has none, and `root` the server's root folder."""
        self._broker, self._env, self._lease, self._root = broker, env, lease, root
        self._executor = ThreadPoolExecutor(_THREADS, "gpuhub-lab")
        self.recipes = RecipeRunner(broker, env, root, self._executor)
        self._overview = SharedReader(self._read_overview, self._executor)

    async def get_overview(self) -> dict[str, Any]:
        """Return the overview, a few seconds old at most.

        Raises:
            BrokerError: The broker refuses or does not answer.
        """
        return await self._overview.get()

    def forget_overview(self) -> None:
        """Let the next overview be read again: something was changed."""
        self._overview.forget()

    async def extend(self, time_limit_s: int) -> None:
        """Let the notebook end in `time_limit_s` seconds.

        Raises:
            UsageError: The notebook has no lease.
            BrokerError: The broker refuses or does not answer.
        """
        if not self._lease:
            raise UsageError("This notebook has no lease, so it has no time limit to extend.")
        await self._run(self._broker.extend_lease, self._lease, time_limit_s)
        self._overview.forget()

    async def suspend(self, *, is_wanted: bool) -> None:
        """Suspend the notebook, or let it wait for its GPU.

        Raises:
            UsageError: The notebook has no lease.
            BrokerError: The broker refuses or does not answer.
        """
        if not self._lease:
            raise UsageError("This notebook has no lease, so it has no GPU to lend.")
        await self._run(self._broker.suspend_notebook if is_wanted else self._broker.resume_notebook, self._lease)
        self._overview.forget()

    async def cancel(self, job_id: str) -> None:
        """End one of the user's jobs.

        Raises:
            BrokerError: The broker refuses or does not answer.
        """
        await self._run(self._broker.delete_job, job_id)
        self._overview.forget()

    async def read_log(self, run_id: str) -> str:
        """Return the end of a run's output; empty if there is none.

        Raises:
            UsageError: It cannot be read.
        """
        return str(await self._run(self._read_log, run_id))

    async def share_notebook(self, path: str, viewer: str, for_s: int) -> dict[str, Any]:
        """Share a notebook, whose path is relative to the server's root folder; return `viewer` and `path` of the page.

        Raises:
            UsageError: The file is not in the home.
            BrokerError: The broker refuses or does not answer.
        """
        file = self._root / path
        if not file.is_relative_to(self._env.home):
            raise UsageError(f"{path} is not in your home, so it cannot be shared.")
        below = str(file.relative_to(self._env.home))
        share = await self._run(self._broker.share_notebook, below, viewer, for_s)
        return {"viewer": share["viewer"], "path": share["path"]}

    def _read_overview(self) -> dict[str, Any]:
        lease = self._broker.get_lease_view(self._lease) if self._lease else None
        return build_overview(
            self._broker.get_cluster_view(), lease, self._broker.list_job_views(ended=True), user=self._env.user
        )

    def _read_log(self, run_id: str) -> str:
        try:
            return logs.read_tail(run_folder.open_run(self._env.home, run_id), most_bytes=_LOG_BYTES)
        except OSError as error:
            raise UsageError(f"The output of {run_id} cannot be read: {error.strerror or error}.") from None

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *arguments))


class LabHandler(APIHandler):  # type: ignore[misc] # Jupyter Server is not installed where types are checked
    """A request of JupyterLab, whose answers and errors are JSON."""

    def initialize(self, backend: LabBackend) -> None:
        self.backend = backend

    async def send(self, answer: Awaitable[Any]) -> None:
        """Send the answer, or why there is none."""
        try:
            body = await answer
        except BrokerError as error:
            self.fail(error.status or 503, str(error))
        except UsageError as error:
            self.fail(404, str(error))
        else:
            self.finish(body or {})

    def fail(self, status: int, message: str) -> None:
        """Send an error."""
        self.set_status(status)
        self.finish({"message": message})


class OverviewHandler(LabHandler):
    """GET: the overview."""

    @web.authenticated
    async def get(self) -> None:
        """Send it."""
        await self.send(self.backend.get_overview())


class ExtendHandler(LabHandler):
    """POST `{"time_limit_s": 3600}`: the notebook ends an hour from now."""

    @web.authenticated
    async def post(self) -> None:
        """Send nothing, or the broker's refusal."""
        seconds = _parse_seconds(self.request.body)
        if seconds is None:
            self.fail(400, 'The request must be {"time_limit_s": SECONDS} with a whole number of seconds from 60.')
            return
        await self.send(self.backend.extend(seconds))


class SuspensionHandler(LabHandler):
    """POST: suspend the notebook. DELETE: let it wait for its GPU."""

    @web.authenticated
    async def post(self) -> None:
        """Send nothing, or the broker's refusal."""
        await self.send(self.backend.suspend(is_wanted=True))

    @web.authenticated
    async def delete(self) -> None:
        """Send nothing, or the broker's refusal."""
        await self.send(self.backend.suspend(is_wanted=False))


class ShareHandler(LabHandler):
    """POST `{"path": …, "viewer": …, "for_s": 3600}`: a colleague may read a notebook for an hour."""

    @web.authenticated
    async def post(self) -> None:
        """Send `{"viewer": …, "path": the page's}`, or the broker's refusal."""
        values = parse_body(self.request.body)
        path, viewer, for_s = values.get("path"), values.get("viewer"), values.get("for_s")
        if not (isinstance(path, str) and isinstance(viewer, str) and isinstance(for_s, int)):
            self.fail(400, 'The request must be {"path": PATH, "viewer": USER, "for_s": SECONDS}.')
            return
        await self.send(self.backend.share_notebook(path, viewer, for_s))


class JobHandler(LabHandler):
    """DELETE: end the job."""

    @web.authenticated
    async def delete(self, job_id: str) -> None:
        """Send nothing, or the broker's refusal."""
        await self.send(self.backend.cancel(job_id))


class LogHandler(LabHandler):
    """GET: `{"text": the end of the run's output}`."""

    @web.authenticated
    async def get(self, run_id: str) -> None:
        """Send it."""
        await self.send(self._read(run_id))

    async def _read(self, run_id: str) -> dict[str, str]:
        return {"text": await self.backend.read_log(run_id)}


def parse_body(body: bytes, *, most_bytes: int = _MAX_BODY_BYTES) -> dict[str, Any]:
    """Return the object in a request's body, empty if there is none or it is too large."""
    try:
        values = json.loads(body) if len(body) <= most_bytes else None
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _parse_seconds(body: bytes) -> int | None:
    seconds = parse_body(body).get("time_limit_s")
    return seconds if isinstance(seconds, int) and not isinstance(seconds, bool) and seconds >= 60 else None


def build_routes(base_url: str, backend: LabBackend) -> list[tuple[str, type[APIHandler], dict[str, Any]]]:
    """Return the routes below a server's base URL."""
    base, arguments = f"{base_url.rstrip('/')}/gpuhub", {"backend": backend}
    return [
        (f"{base}/overview", OverviewHandler, arguments),
        (f"{base}/extend", ExtendHandler, arguments),
        (f"{base}/suspension", SuspensionHandler, arguments),
        (f"{base}/jobs/{_RUN}", JobHandler, arguments),
        (f"{base}/shares", ShareHandler, arguments),
        (f"{base}/runs/{_RUN}/log", LogHandler, arguments),
    ]
