"""Long-lived workers for calls: ipyparallel's engines, each in a container of its own with its GPUs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

from gpu_launch.errors import LaunchFailed
from gpu_launch.launch.workers import ipp_controller
from gpu_launch.output.screens import find_screen
from gpu_launch.sessions import calls

#: Engines of the notebook's own machine, without GPUs.
LOCAL = "local"
_POLL_S = 0.1  # seconds between polls of a start


class WorkerGone(Exception):
    """The worker has ended."""


class EngineWorkers:
    """The engines of one cluster. One thread uses it, except for `cancel`; `on_done` is called in another."""

    def __init__(self, count: int, *, engines: str, nproc_per_node: int, model: str) -> None:
        self._count, self._engines = count, engines
        self._nproc_per_node, self._model = nproc_per_node, model
        self._cluster: Any = None
        self._client: Any = None
        self._cancelled = threading.Event()

    def start(self) -> list[int]:
        """Ask for the workers and show what they wait for; return their numbers when all of them run.

        Raises:
            GpuLaunchError: They cannot be had, or the start was cancelled.
        """
        import ipyparallel
        from traitlets.config import Config

        config = Config()
        if self._engines != LOCAL:
            config.LocalControllerLauncher.controller_cmd = list(ipp_controller.COMMAND)
            config.GpuhubEngineSetLauncher.nproc_per_node = self._nproc_per_node
            config.GpuhubEngineSetLauncher.model = self._model
        log = logging.getLogger("gpu_launch.ipyparallel")
        log.setLevel(logging.CRITICAL)
        self._cluster = ipyparallel.Cluster(n=self._count, engines=self._engines, config=config, log=log)
        try:
            self._client = asyncio.run(self._connect())
        except asyncio.CancelledError:
            raise LaunchFailed("The start of the workers was cancelled.") from None
        return list(self._client.ids)

    def cancel(self) -> None:
        """Cancel a start that has not ended; thread-safe."""
        self._cancelled.set()

    async def _connect(self) -> Any:
        start = asyncio.ensure_future(self._cluster.start_and_connect(activate=False))
        screen, shown = find_screen(), 0
        while not start.done() and not self._cancelled.is_set():
            await asyncio.wait([start], timeout=_POLL_S)
            lines = [line for launcher in self._cluster.engines.values() for line in getattr(launcher, "progress", ())]
            for line in lines[shown:]:
                screen.write("stdout", f"gpu_launch: {line}\n")
                screen.flush()
            shown = len(lines)
        start.cancel()
        return await start

    def submit(self, worker: int, payload: bytes, on_done: Callable[[int, Any], None]) -> None:
        """Run a call on an idle worker; `on_done` gets the worker and what `read` takes.

        Raises:
            WorkerGone: The worker has ended.
        """
        from ipyparallel.error import NoEnginesRegistered

        try:
            call = self._client[worker].apply_async(calls.run_call, payload)
        except (LookupError, NoEnginesRegistered):
            raise WorkerGone(str(worker)) from None
        call.add_done_callback(lambda done: on_done(worker, done))

    def read(self, done: Any) -> bytes:
        """Return the answer of an ended call, and forget it.

        Raises:
            WorkerGone: The worker ended before the call.
        """
        from ipyparallel.error import IPythonError

        try:
            data: bytes = done.get(timeout=0)
        except IPythonError as error:
            raise WorkerGone(str(error)) from None
        finally:
            self._client.purge_local_results(done)
        return data

    def stop(self) -> None:
        """End the workers; their GPUs are free when this returns."""
        if self._client is not None:
            self._client.close()
        if self._cluster is not None:
            self._cluster.stop_cluster_sync()
