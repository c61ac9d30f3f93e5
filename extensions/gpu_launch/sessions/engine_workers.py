"""Standing workers for calls: ipyparallel's engines, each in a container of its own with its GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from gpu_launch.sessions import calls

#: Engines of the notebook's own machine, without GPUs.
LOCAL = "local"


class WorkerGone(Exception):
    """The worker has ended."""


class EngineWorkers:
    """The engines of one cluster. One thread uses it; `on_done` is called in another."""

    def __init__(self, count: int, *, engines: str, nproc_per_node: int, model: str) -> None:
        self._count, self._engines = count, engines
        self._nproc_per_node, self._model = nproc_per_node, model
        self._cluster: Any = None
        self._client: Any = None

    def start(self) -> list[int]:
        """Ask for the workers; return their numbers when all of them run.

        Raises:
            GpuLaunchError: They cannot be had.
        """
        import ipyparallel
        from traitlets.config import Config

        config = Config()
        if self._engines != LOCAL:
            config.GpuhubEngineSetLauncher.nproc_per_node = self._nproc_per_node
            config.GpuhubEngineSetLauncher.model = self._model
        log = logging.getLogger("gpu_launch.ipyparallel")
        log.setLevel(logging.CRITICAL)
        self._cluster = ipyparallel.Cluster(n=self._count, engines=self._engines, config=config, log=log)
        self._client = self._cluster.start_and_connect_sync(activate=False)
        return list(self._client.ids)

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
