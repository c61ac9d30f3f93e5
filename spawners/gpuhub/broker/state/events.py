"""Events about leases and jobs, and a log that writes other events in batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from gpuhub.broker_api.schemas import JobState, LeaseState, SuspensionState
from gpuhub.common.errors import Unavailable
from gpuhub.domain.clock import wait_event
from gpuhub.domain.job_states import explain_preemption
from gpuhub.domain.models import EventRow, JobRow, LeasedGpu, LeaseRow, Suspension
from gpuhub.domain.notifications import list_job_notifications, list_lease_notifications

log = logging.getLogger(__name__)

#: Events are written after this delay, seconds.
WRITE_DELAY_S = 0.3
#: Events that are kept in memory while the store cannot be written.
MAX_BUFFERED = 10_000


def list_lease_events(
    before: LeaseRow | None, after: LeaseRow, now: float, job: JobRow | None = None
) -> Iterator[EventRow]:
    """Yield the events of a lease between two versions of its row; `job` is the one that it belongs to."""
    node = after.nodes[0] if len(after.nodes) == 1 else None
    notifications = tuple(list_lease_notifications(before, after, now, job))
    for kind, text in _list_lease_changes(before, after):
        yield EventRow(
            at=now, kind=kind, text=text, owner=after.owner, lease=after.id, node=node, notifications=notifications
        )


def list_job_events(before: JobRow | None, after: JobRow, now: float) -> Iterator[EventRow]:
    """Yield the events of a job between two versions of its row."""
    old = None if before is None else before.state
    if after.state is old:
        return
    text = {
        JobState.PREEMPTING: f"job {after.run_id} of {after.owner} is preempted and may write a checkpoint",
        JobState.ENDED: f"job {after.run_id} of {after.owner} ended: {after.reason}",
    }.get(after.state)
    if after.state is JobState.WAITING and before is not None:
        text = f"job {after.run_id} of {after.owner} waits again: {after.reason or explain_preemption(before)}"
    if text is not None:
        kind = "requeued" if after.state is JobState.WAITING else after.state.value
        notifications = tuple(list_job_notifications(before, after, now))
        yield EventRow(
            at=now,
            kind=f"job.{kind}",
            text=text,
            owner=after.owner,
            lease=after.lease_id,
            job=after.id,
            notifications=notifications,
        )


def _list_lease_changes(before: LeaseRow | None, after: LeaseRow) -> Iterator[tuple[str, str]]:
    old = None if before is None else before.state
    who = f"{after.purpose} lease of {after.owner}"
    if after.granted_at is not None and (before is None or before.granted_at is None):
        note = f" ({after.note})" if after.note else ""
        yield "lease.granted", f"{who}: {_describe(after.gpus, after.nodes)}{note}"
    shed = _find_newly_set(before, after, "shrink_requested_at")
    if shed:
        yield "lease.shed", f"{who} releases {_describe(shed, ())}"
    if before is not None and after.state is LeaseState.ACTIVE and before.suspension != after.suspension:
        yield from _list_suspension_changes(before.suspension, after)
    if after.state is old:
        return
    if after.state is LeaseState.RELEASING:
        yield "lease.releasing", f"{who} ends: {after.reason}"
    elif after.state is LeaseState.QUARANTINED:
        yield "lease.quarantined", f"{who} ends without proof, its GPUs stay blocked: {after.note}"
    elif after.state is LeaseState.RELEASED:
        yield "lease.released", f"{who} is over: {after.reason}"


def _list_suspension_changes(before: Suspension | None, after: LeaseRow) -> Iterator[tuple[str, str]]:
    name, gpus = f"{after.owner}'s {after.purpose}", _describe(after.gpus, after.nodes)
    old, new = (None if part is None else part.state for part in (before, after.suspension))
    if new is old:
        return
    if old is SuspensionState.SUSPENDING and after.suspension is not None:
        memory = f"{after.suspension.moved_mib / 1024:.1f} GiB"
        yield "lease.suspended", f"{name} is suspended, {memory} of GPU memory are in host memory: {gpus} is free"
    if new is SuspensionState.RESUMING:
        yield "lease.resuming", f"{name} waits for {gpus} to continue"
    elif new is SuspensionState.RESTORING:
        yield "lease.restoring", f"{name} gets {gpus} back, and its memory is being moved there"
    elif new is None and old is SuspensionState.RESTORING:
        yield "lease.resumed", f"{name} has {gpus} back and continues"


def _find_newly_set(before: LeaseRow | None, after: LeaseRow, moment: str) -> tuple[LeasedGpu, ...]:
    old = {gpu.uuid for gpu in (before.gpus if before is not None else ()) if getattr(gpu, moment) is not None}
    return tuple(gpu for gpu in after.gpus if getattr(gpu, moment) is not None and gpu.uuid not in old)


def _describe(gpus: tuple[LeasedGpu, ...], nodes: tuple[str, ...]) -> str:
    """Return the GPUs for people, `GPU 0 of rig1, part 2 of 4 of GPU 1 of rig1`; the nodes of a lease without GPUs."""
    return ", ".join([_describe_gpu(gpu) for gpu in gpus] or nodes)


def _describe_gpu(gpu: LeasedGpu) -> str:
    whole = f"GPU {gpu.index} of {gpu.node}"
    return whole if gpu.share == 1 else f"part {gpu.part + 1} of {gpu.share} of {whole}"


class EventLog:
    """Events that belong to no change of the ledger; they are written a little later, in batches."""

    def __init__(self, save: Callable[[list[EventRow]], None]) -> None:
        """`save` blocks, and raises Unavailable if the events cannot be written."""
        self._save = save
        self._buffer: list[EventRow] = []
        self._writing = asyncio.Lock()
        self._closing = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    def add(self, event: EventRow) -> None:
        self._buffer.append(event)
        del self._buffer[:-MAX_BUFFERED]
        if self._writer is None:
            self._writer = asyncio.ensure_future(self._write_later())

    async def flush(self) -> None:
        """Write all events so far, and wait for a call that is still writing; what cannot be written is kept."""
        async with self._writing:
            events, self._buffer = self._buffer, []
            if not events:
                return
            try:
                await asyncio.to_thread(self._save, events)
            except Unavailable as error:
                log.warning("%d events are written later: %s", len(events), error)
                self._buffer = events + self._buffer

    async def close(self) -> None:
        """Write all events now, and end the log."""
        self._closing.set()
        if self._writer is not None:
            await asyncio.wait([self._writer])
        await self.flush()

    async def _write_later(self) -> None:
        try:
            while self._buffer and not self._closing.is_set():
                await wait_event(self._closing, WRITE_DELAY_S)
                await self.flush()
        finally:
            self._writer = None
