"""The Jupyter Server extension of gpuhub's image: reports to the broker, and the routes for JupyterLab's extension.

It also links the cluster's models into the user's cache, and opens the way to services. Most routes are in
`lab_routes` and `recipe_routes`.

`GET gpuhub/idle` returns when the notebook will be stopped, whether it is suspended and what is wrong with its GPUs,
`POST gpuhub/keep` keeps it, and `GET gpuhub/notifications` returns the user's notifications; all are below the server's
own address, behind its login.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from jupyter_server.base.handlers import APIHandler
from tornado import web

from gpu_launch import environment
from gpu_launch.broker.client import BrokerClient
from gpu_launch.common import service_gateway
from gpu_launch.common.shared_models import start_linking
from gpu_launch.errors import BrokerError
from gpu_launch.notebook_server import activity, lab_routes, recipe_routes
from gpu_launch.notebook_server.cells import CellWatch
from gpu_launch.notebook_server.held_cells import HeldCells, find_process
from gpu_launch.notebook_server.notifications import NotificationFeed, NotificationsHandler
from gpu_launch.notebook_server.programs import UserPrograms, find_programs

#: Time that a report waits for a broker that restarts, and until the next report after a failure, seconds.
_RETRY_LIMIT_S = 5.0
_RETRY_S = 10.0


class IdleReporter:
    """Reports what happens in the notebook, and keeps what the broker answers."""

    def __init__(self, server: Any, broker: BrokerClient, lease: str) -> None:
        """`server` is Jupyter Server's application, and `lease` the id of the notebook's lease."""
        self._server = server
        self._broker = broker
        self._lease = lease
        self._wake = asyncio.Event()
        self._cells = CellWatch(server.kernel_manager, on_start=self._note_start)
        self._saved_at: datetime | None = None
        #: When a cell last began, on the monotonic clock; None if none has.
        self._cell_at: float | None = None
        #: The programs of the last report, and of the last one before the notebook was suspended.
        self._running: frozenset[Any] = frozenset()
        self._known: frozenset[Any] = frozenset()
        #: The broker's `IdleView`; None while the notebook is not idle.
        self.idle: dict[str, Any] | None = None
        #: Defects and slowdowns of the notebook's GPUs, as texts.
        self.gpu_problems: list[str] = []
        #: The broker's `SuspensionView`; None while the notebook has its GPU as usual.
        self.suspension: dict[str, Any] | None = None
        self._held = HeldCells(self._wake.set)
        settings = server.web_app.settings
        connections = settings.get("kernel_websocket_connection_class")
        if connections is not None:
            settings["kernel_websocket_connection_class"] = self._held.build_connection_class(connections)
        server.contents_manager.register_post_save_hook(self._note_save)

    async def run(self) -> None:
        """Report for ever."""
        while True:
            pause_s = await self.report()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            self._wake.clear()

    async def report(self) -> float:
        """Report once; return the seconds until the next report."""
        try:
            state = self._collect(await self._call(self._prepare_search()))
            answer = await self._call(partial(self._broker.report_activity, self._lease, **state))
        except BrokerError as error:
            self._server.log.info("This notebook's activity could not be reported to the broker: %s", error)
            return _RETRY_S
        self.idle = answer["idle"]
        self.gpu_problems = [str(problem) for problem in answer.get("gpu_problems", ())]
        self.suspension = answer.get("suspension")
        self._held.set_holding(self.suspension is not None)
        if self.suspension is None:
            self._known = self._running
        return float(answer["report_in_s"])

    async def keep(self) -> None:
        """Keep the idle notebook.

        Raises:
            BrokerError: The broker refuses or does not answer.
        """
        self.idle = await self._call(partial(self._broker.keep_notebook, self._lease))

    async def _call(self, function: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, function)

    def _prepare_search(self) -> Callable[[], UserPrograms]:
        """Return a function that finds the user's programs in a thread.

        Kernels and terminals are listed before: they come and go in the event loop.
        """
        terminals = self._server.web_app.settings.get("terminal_manager")
        kernels = self._server.kernel_manager
        pids = [find_process(kernels.get_kernel(kernel)) for kernel in kernels.list_kernel_ids()]
        return partial(
            find_programs,
            server=os.getpid(),
            shells=[] if terminals is None else [shell.ptyproc.pid for shell in terminals.terminals.values()],
            kernels=list(filter(None, pids)),
        )

    def _collect(self, programs: UserPrograms) -> dict[str, Any]:
        self._cells.refresh()
        terminals = self._server.web_app.settings.get("terminal_manager")
        found = activity.assess(
            now=datetime.now(UTC),
            started_at=self._server.web_app.settings["started"],
            kernels=self._server.kernel_manager.list_kernels(),
            terminals=[] if terminals is None else terminals.list(),
            programs=programs,
            saved_at=self._saved_at,
        )
        self._running = programs.running
        # A suspended notebook gets its GPU back for a cell that waits, and for a program that was started meanwhile.
        wants_gpu = self._held.is_waiting or (self.suspension is not None and bool(self._running - self._known))
        return {
            "is_busy": found.is_busy or self._cells.is_running or wants_gpu,
            "inactive_s": found.inactive_s,
            "last_cell_s": None if self._cell_at is None else time.monotonic() - self._cell_at,
        }

    def _note_start(self) -> None:
        """Report at once that a cell runs in a notebook that may be stopped at any moment, or is suspended."""
        self._cell_at = time.monotonic()
        if self.idle is not None or self.suspension is not None:
            self._wake.set()

    def _note_save(self, **_file: Any) -> None:
        self._saved_at = datetime.now(UTC)


class _ReporterHandler(APIHandler):  # type: ignore[misc] # Jupyter Server is not installed where types are checked
    def initialize(self, reporter: IdleReporter) -> None:
        self.reporter = reporter


class IdleHandler(_ReporterHandler):
    """GET: `{"idle": IdleView or null, "gpu_problems": [text, …], "suspension": SuspensionView or null}`."""

    @web.authenticated
    def get(self) -> None:
        """Send the broker's last answer."""
        reporter = self.reporter
        self.finish({"idle": reporter.idle, "gpu_problems": reporter.gpu_problems, "suspension": reporter.suspension})


class KeepHandler(_ReporterHandler):
    """POST: keep the notebook."""

    @web.authenticated
    async def post(self) -> None:
        """Send the new state, or the broker's refusal as `{"message": text}`."""
        try:
            await self.reporter.keep()
        except BrokerError as error:
            self.set_status(error.status or 503)
            self.finish({"message": str(error)})
            return
        self.finish({"idle": self.reporter.idle})


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(server: Any) -> None:
    """Link the cluster's models, open the way to services, add the routes and begin to report.

    Outside gpuhub nothing happens.
    """
    env, lease = environment.read(), os.environ.get("GPUHUB_LEASE", "")
    start_linking(os.environ, env.home)
    service_gateway.start_in_thread(env)
    if env.broker_url is None or env.token is None:
        return
    base = server.web_app.settings["base_url"].rstrip("/")
    # JupyterLab asks again by itself, so no request waits for a broker that restarts.
    backend = lab_routes.LabBackend(
        BrokerClient.for_notebook(env, retry_limit_s=0.0), env, lease, Path(server.root_dir)
    )
    routes = [*lab_routes.build_routes(base, backend), *recipe_routes.build_recipe_routes(base, backend)]
    server.web_app.add_handlers(".*$", routes)
    if not lease:
        return
    broker = BrokerClient.for_notebook(env, retry_limit_s=_RETRY_LIMIT_S)
    reporter, feed = IdleReporter(server, broker, lease), NotificationFeed(server, broker)
    server.web_app.add_handlers(
        ".*$",
        [
            (f"{base}/gpuhub/idle", IdleHandler, {"reporter": reporter}),
            (f"{base}/gpuhub/keep", KeepHandler, {"reporter": reporter}),
            (f"{base}/gpuhub/notifications", NotificationsHandler, {"feed": feed}),
        ],
    )
    # Kept by the reference, since the event loop has only weak ones.
    server.web_app.settings["gpuhub_tasks"] = [asyncio.ensure_future(part.run()) for part in (reporter, feed)]
