"""One job of the broker's, followed and renewed for as long as it is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from gpu_launch import wire
from gpu_launch.broker import Broker
from gpu_launch.errors import BrokerError, GpuLaunchError

#: Renewals within the time a job lives without one.
_RENEWALS = 4
_FREED_S = 60.0  # seconds to wait for the broker's proof that the GPUs are free


class TrackedJob:
    """A job as last seen, with its workers numbered as their containers are."""

    def __init__(
        self, broker: Broker, job: wire.Job, *, first_worker: int = 0, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._broker, self._first, self._on_change = broker, first_worker, on_change
        self._stopping = threading.Event()
        #: What went wrong; None for nothing.
        self.error: GpuLaunchError | None = None
        self.job = self._numbered(job)
        for target in (self._follow, self._renew):
            threading.Thread(target=target, args=(job,), name="gpu_launch job", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.error is not None or self.job.state in (wire.STOPPING, wire.ENDED)

    def look(self) -> None:
        """Ask the broker how the job is now."""
        if not self._stopping.is_set():
            self._set(self._broker.job(self.job.id))

    def free(self) -> None:
        """End the job; returns when the broker has said that its GPUs are free."""
        self.stop()
        self.job = self._numbered(free(self._broker, self.job))

    def stop(self) -> None:
        """Follow and renew it no longer."""
        self._stopping.set()

    def _numbered(self, job: wire.Job) -> wire.Job:
        if not self._first:
            return job
        return replace(job, workers=tuple(replace(one, index=one.index + self._first) for one in job.workers))

    def _set(self, job: wire.Job) -> None:
        self.job = self._numbered(job)
        self._on_change()

    def _follow(self, job: wire.Job) -> None:
        """Keep `job` as the broker has it."""
        while not self._stopping.is_set() and job.state != wire.ENDED:
            try:
                job = self._broker.job(job.id, version=job.version)
            except BrokerError as error:
                self._fail(error)
                return
            if not self._stopping.is_set():
                self._set(job)

    def _renew(self, job: wire.Job) -> None:
        """Say that the kernel lives, until it does not."""
        while not self._stopping.wait(job.renew_within_s / _RENEWALS):
            try:
                self._broker.renew(job.id)
            except BrokerError as error:
                self._fail(error)
                return

    def _fail(self, error: GpuLaunchError) -> None:
        if not self._stopping.is_set():
            self.error = error
            self._on_change()


def free(broker: Broker, job: wire.Job) -> wire.Job:
    """End a job; as it is when its GPUs are free. BrokerError where that takes too long."""
    job = broker.delete_job(job.id)
    deadline = time.monotonic() + _FREED_S
    while job.state != wire.ENDED:
        if time.monotonic() > deadline:
            text = f"The GPUs of {job.run_id} are not free after {_FREED_S:.0f} s; the broker goes on trying."
            raise BrokerError(text)
        job = broker.job(job.id, version=job.version, wait_s=5.0)
    return job
