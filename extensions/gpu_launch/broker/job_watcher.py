"""Follows and renews one job of the broker, and ends it with the proof that its GPUs are free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from gpu_launch.broker import models
from gpu_launch.broker.client import BrokerClient
from gpu_launch.errors import BrokerError, GpuLaunchError

#: Renewals within the time after which a job ends without one.
_RENEWALS_PER_PERIOD = 4
_RELEASE_TIMEOUT_S = 60.0  # seconds until the broker must have proof that the GPUs are free


class JobWatcher:
    """Follows and renews a job, and has its last known state; workers have the indexes of their containers."""

    def __init__(
        self,
        broker: BrokerClient,
        job: models.Job,
        *,
        first_worker: int = 0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._broker, self._first, self._on_change = broker, first_worker, on_change
        self._stopping = threading.Event()
        #: The failure, None if there is none.
        self.error: GpuLaunchError | None = None
        self.job = self._number_workers(job)
        for target in (self._follow, self._renew):
            threading.Thread(target=target, args=(job,), name="gpu_launch job", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Return whether the job has failed or is ending."""
        return self.error is not None or self.job.state in (models.STOPPING, models.ENDED)

    def refresh(self) -> None:
        """Fetch the job's current state from the broker."""
        if not self._stopping.is_set():
            self._set(self._broker.get_job(self.job.id))

    def release(self) -> None:
        """End the job and wait until the broker reports its GPUs as free."""
        self.stop()
        self.job = self._number_workers(release_job(self._broker, self.job))

    def stop(self) -> None:
        """Stop following and renewing the job."""
        self._stopping.set()

    def _number_workers(self, job: models.Job) -> models.Job:
        if not self._first:
            return job
        return replace(job, workers=tuple(replace(worker, index=worker.index + self._first) for worker in job.workers))

    def _set(self, job: models.Job) -> None:
        self.job = self._number_workers(job)
        self._on_change()

    def _follow(self, job: models.Job) -> None:
        """Update `job` with every change."""
        while not self._stopping.is_set() and job.state != models.ENDED:
            try:
                job = self._broker.get_job(job.id, version=job.version)
            except BrokerError as error:
                self._fail(error)
                return
            if not self._stopping.is_set():
                self._set(job)

    def _renew(self, job: models.Job) -> None:
        """Renew the job while the kernel lives."""
        while not self._stopping.wait(job.renew_within_s / _RENEWALS_PER_PERIOD):
            try:
                self._broker.renew_job(job.id)
            except BrokerError as error:
                self._fail(error)
                return

    def _fail(self, error: GpuLaunchError) -> None:
        if not self._stopping.is_set():
            self.error = error
            self._on_change()


def release_job(broker: BrokerClient, job: models.Job) -> models.Job:
    """End a job and return it when its GPUs are free.

    Raises:
        BrokerError: That takes too long.
    """
    job = broker.delete_job(job.id)
    deadline = time.monotonic() + _RELEASE_TIMEOUT_S
    while job.state != models.ENDED:
        if time.monotonic() > deadline:
            text = (
                f"The GPUs of {job.run_id} are not free after {_RELEASE_TIMEOUT_S:.0f} s; the broker continues to try."
            )
            raise BrokerError(text)
        job = broker.get_job(job.id, version=job.version, wait_s=5.0)
    return job
