"""What the broker tells of leases and jobs (pure), and a log that writes what is told in batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from gpuhub.broker.clock import wait_event
from gpuhub.broker.job_rules import PREEMPTED
from gpuhub.broker.rows import EventRow, JobRow, LeasedGpu, LeaseRow
from gpuhub.broker.schemas import JobState, LeaseState
from gpuhub.errors import Unavailable

log = logging.getLogger(__name__)

#: What is told is written after so long at the latest, seconds.
DELAY_S = 0.3
#: While the store does not work, so many events are kept for later.
CAPACITY = 10_000


def of_lease(before: LeaseRow | None, after: LeaseRow, now: float) -> Iterator[EventRow]:
    """What happened to a lease between two moments that others saw."""
    node = after.nodes[0] if len(after.nodes) == 1 else None
    for kind, text in _lease_news(before, after):
        yield EventRow(at=now, kind=kind, text=text, owner=after.owner, lease=after.id, node=node)


def of_job(before: JobRow | None, after: JobRow, now: float) -> Iterator[EventRow]:
    """What happened to a job between two moments that others saw."""
    old = None if before is None else before.state
    if after.state is old:
        return
    text = {
        JobState.PREEMPTING: f"job {after.run_id} of {after.owner} is preempted and may write a checkpoint",
        JobState.ENDED: f"job {after.run_id} of {after.owner} ended: {after.reason}",
    }.get(after.state)
    if after.state is JobState.WAITING and old is not None:
        text = f"job {after.run_id} of {after.owner} waits again: {PREEMPTED}"
    if text is not None:
        kind = "requeued" if after.state is JobState.WAITING else after.state.value
        yield EventRow(at=now, kind=f"job.{kind}", text=text, owner=after.owner, lease=after.lease_id, job=after.id)


def _lease_news(before: LeaseRow | None, after: LeaseRow) -> Iterator[tuple[str, str]]:
    old = None if before is None else before.state
    who = f"{after.purpose} lease of {after.owner}"
    if after.granted_at is not None and (before is None or before.granted_at is None):
        note = f" ({after.note})" if after.note else ""
        yield "lease.granted", f"{who}: {_describe(after.gpus, after.nodes)}{note}"
    shed = _newly(before, after, "shed_at")
    if shed:
        yield "lease.shed", f"{who} gives back {_describe(shed, ())}"
    if after.state is old:
        return
    if after.state is LeaseState.RELEASING:
        yield "lease.releasing", f"{who} ends: {after.reason}"
    elif after.state is LeaseState.QUARANTINED:
        yield "lease.quarantined", f"{who} ends without proof, its GPUs stay blocked: {after.note}"
    elif after.state is LeaseState.RELEASED:
        yield "lease.released", f"{who} is over: {after.reason}"


def _newly(before: LeaseRow | None, after: LeaseRow, moment: str) -> tuple[LeasedGpu, ...]:
    old = {gpu.uuid for gpu in (before.gpus if before is not None else ()) if getattr(gpu, moment) is not None}
    return tuple(gpu for gpu in after.gpus if getattr(gpu, moment) is not None and gpu.uuid not in old)


def _describe(gpus: tuple[LeasedGpu, ...], nodes: tuple[str, ...]) -> str:
    """`GPU 0 of rig1, part 2 of 4 of GPU 1 of rig1`; for a lease without GPUs its nodes."""
    return ", ".join([_describe_gpu(gpu) for gpu in gpus] or nodes)


def _describe_gpu(gpu: LeasedGpu) -> str:
    whole = f"GPU {gpu.index} of {gpu.node}"
    return whole if gpu.share == 1 else f"part {gpu.part + 1} of {gpu.share} of {whole}"


class EventLog:
    """Events that belong to no change of the ledger, written a little later and together."""

    def __init__(self, save: Callable[[list[EventRow]], None]) -> None:
        """`save` writes events, blocks, and raises Unavailable when they cannot be written."""
        self._save = save
        self._told: list[EventRow] = []
        self._closing = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    def note(self, event: EventRow) -> None:
        """Tell of something."""
        self._told.append(event)
        del self._told[:-CAPACITY]
        if self._writer is None:
            self._writer = asyncio.ensure_future(self._write_later())

    async def flush(self) -> None:
        """Write what was told so far; what cannot be written is kept for later."""
        told, self._told = self._told, []
        if not told:
            return
        try:
            await asyncio.to_thread(self._save, told)
        except Unavailable as error:
            log.warning("%d events are written later: %s", len(told), error)
            self._told = told + self._told

    async def close(self) -> None:
        """Write everything now."""
        self._closing.set()
        if self._writer is not None:
            await asyncio.wait([self._writer])
        await self.flush()

    async def _write_later(self) -> None:
        try:
            while self._told and not self._closing.is_set():
                await wait_event(self._closing, DELAY_S)
                await self.flush()
        finally:
            self._writer = None
