"""Couriers that a backend runs, on nodes without containers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.broker.files.courier_client import CourierClient
from gpuhub.domain.models import JobRow, WorkerRow


class BackendCouriers:
    """Runs each command in a courier of its own; see `Couriers`."""

    def __init__(self, backend: SchedulingBackend) -> None:
        self._backend = backend

    @asynccontextmanager
    async def connect(self, owner: str, arguments: Sequence[str]) -> AsyncIterator[CourierClient]:
        """Run one command on the files of an owner's home.

        Raises:
            Unavailable: The courier cannot be started.
            GpuhubError: As for `CourierClient`.
        """
        async with CourierClient(await self._backend.start_courier(owner, arguments)) as client:
            yield client

    @asynccontextmanager
    async def connect_job(self, job: JobRow, arguments: Sequence[str]) -> AsyncIterator[CourierClient]:
        """Run one command on the files of a job, which are in its owner's home.

        Raises:
            Unavailable, GpuhubError: As for `connect`.
        """
        async with self.connect(job.owner, arguments) as client:
            yield client

    @asynccontextmanager
    async def connect_worker(
        self, job: JobRow, worker: WorkerRow, arguments: Sequence[str]
    ) -> AsyncIterator[CourierClient]:
        """Run one command beside a running worker.

        Raises:
            Unavailable, GpuhubError: As for `connect`.
        """
        async with CourierClient(await self._backend.start_courier_of_job(job, worker.node, arguments)) as client:
            yield client
