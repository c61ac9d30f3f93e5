"""Follows a job: its place in the queue, its output, its end. Waits for hub and broker when they restart."""

from __future__ import annotations

import codecs
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gpu_launch.broker import models
from gpu_launch.cli import job_lookup, tables
from gpu_launch.cli.connection.http import RESTARTING
from gpu_launch.cli.context import CommandExit, Context, exit_with
from gpu_launch.errors import BrokerError
from gpu_launch.output import text as render

INTERRUPTED = 130
#: Maximum wait for a restart of hub, proxy or broker, seconds.
RETRY_LIMIT_S = 600.0
#: A stream may be dead after this many seconds of silence, for example after the laptop slept; it is opened again.
SILENCE_S = 60.0
#: Seconds between checks for Ctrl-C, which Windows needs.
_TICK_S = 0.25
_RETRY_S = 1.0  # seconds
_LONG_POLL_S = 20.0
_Events = queue.SimpleQueue[bytes | models.Job | BaseException | None]
_Target = Callable[[threading.Event, _Events], None]


def follow_to_end(context: Context, job: models.Job, *, offset: int = 0, cancels: bool) -> None:
    """Follow a job, then end the command with the job's exit status.

    With `cancels` the first Ctrl-C ends the job and a second one stops waiting; without it Ctrl-C leaves the job
    running.
    """
    if not job.is_ended and (text := describe_state(job)):
        context.console.print_note(f"gpu-launch: {text}")
    follower = Follower(context=context, job=job, offset=offset)
    is_cancelled = False
    try:
        try:
            job = follower.run()
        except KeyboardInterrupt:
            if not cancels:
                raise
            is_cancelled = True
            context.console.print_note(f"\ngpu-launch: cancelling {job.run_id}; Ctrl-C again does not wait for its end")
            context.broker.delete_job(job.id)
            job = follower.run()
    except KeyboardInterrupt:
        _report_interrupt(context, job, is_cancelled=is_cancelled)
    except BrokerError as error:
        raise BrokerError(
            f"{error} {job.run_id} continues: gpu-launch attach {job.run_id}", status=error.status
        ) from None
    report_end(context, job, is_cancelled=is_cancelled)


def report_end(context: Context, job: models.Job, *, is_cancelled: bool) -> None:
    """Report how the job ended, and what it used of its GPUs.

    Raises:
        CommandExit: The exit status is not 0.
    """
    if job.costs:
        context.console.print_note(f"gpu-launch: {job.costs}")
    if context.console.is_json:
        # A script cannot find the first failing rank's traceback in the output.
        state = context.transfer.read_status(job.id) if job.exit_code and not is_cancelled else None
        context.console.print_result(
            tables.build_job_json(job) | {"error": state.error if state is not None else ""}, ""
        )
    if is_cancelled:
        raise CommandExit(f"{job.run_id} was cancelled.", status=INTERRUPTED)
    if job.exit_code is None:
        raise CommandExit(f"{job.run_id} ended without an exit status: {job.reason or 'no reason is known'}.", status=1)
    if job.exit_code:
        raise CommandExit(
            f"{job.run_id} ended with exit status {job.exit_code}.", status=convert_exit_code(job.exit_code)
        )
    context.console.print_note(
        f"gpu-launch: {job.run_id} is done; its files: gpu-launch cp {job_lookup.shorten_run_id(job.run_id)}:. DIR"
    )


def _report_interrupt(context: Context, job: models.Job, *, is_cancelled: bool) -> None:
    context.console.clear_progress()
    short = job_lookup.shorten_run_id(job.run_id)
    context.console.print_note(
        f"gpu-launch: {job.run_id} is being ended"
        if is_cancelled
        else f"\ngpu-launch: detached; the job continues: gpu-launch attach {short}, or cancel {short}"
    )
    if context.console.is_json:
        context.console.print_result(tables.build_job_json(context.broker.get_job(job.id)), "")
    exit_with(INTERRUPTED)


def convert_exit_code(code: int) -> int:
    """Return the process exit status for a job's exit code: 1 to 255 unless it is 0."""
    return code if 0 <= code <= 255 else 1


@dataclass
class Follower:
    """Follows one job to its end."""

    context: Context
    job: models.Job
    #: Show the output of this rank alone; None for the job's output.
    rank: int | None = None
    #: Number of bytes of the output that were shown.
    offset: int = 0
    _events: _Events = field(default_factory=queue.SimpleQueue)
    _stop: threading.Event = field(default_factory=threading.Event)
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def run(self) -> models.Job:
        """Return the job when it has ended and all its output is shown.

        A KeyboardInterrupt does not change the job; `run` may be called again.

        Raises:
            BrokerError: The hub or broker refuses, or does not answer for too long.
        """
        self._stop = threading.Event()
        self._events = queue.SimpleQueue()
        threads = [
            threading.Thread(target=self._in_thread, args=(target, self._stop, self._events), daemon=True)
            for target in (self._watch, self._read_logs)
        ]
        for thread in threads:
            thread.start()
        running = len(threads)
        try:
            while running:
                event = self._next_event()
                if event is None:
                    running -= 1
                elif isinstance(event, BaseException):
                    raise event
                elif isinstance(event, bytes):
                    self._write(event)
                else:
                    self._report_change(event)
        finally:
            self._stop.set()
        self._write(b"", final=True)
        self.context.console.clear_progress()
        return self.job

    def _next_event(self) -> bytes | models.Job | BaseException | None:
        while True:
            # On Windows, Ctrl-C cannot interrupt a wait without a time limit.
            with contextlib.suppress(queue.Empty):
                return self._events.get(timeout=_TICK_S)

    def _write(self, data: bytes, *, final: bool = False) -> None:
        self.offset += len(data)
        text = self._decoder.decode(data, final=final)
        if text:
            self.context.console.write_output(text)

    def _report_change(self, job: models.Job) -> None:
        """Print the new state of the job."""
        old, self.job = self.job, job
        if job.is_ended:
            return
        text = describe_state(job)
        if text and text != describe_state(old):
            self.context.console.print_note(f"gpu-launch: {text}")

    def _in_thread(self, target: _Target, stop: threading.Event, events: _Events) -> None:
        try:
            target(stop, events)
            events.put(None)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the main thread raises it
            events.put(error)

    def _watch(self, stop: threading.Event, events: _Events) -> None:
        """Put every change of the job into the queue until it has ended."""
        broker = self.context.build_broker(RETRY_LIMIT_S)
        job = self.job
        while not job.is_ended and not stop.is_set():
            new = broker.get_job(job.id, version=job.version, wait_s=_LONG_POLL_S)
            self.context.reset_notes()
            if new.version != job.version:
                events.put(new)
            job = new

    def _read_logs(self, stop: threading.Event, events: _Events) -> None:
        """Put all output into the queue, continuing after a broken stream."""
        broker = self.context.build_broker(RETRY_LIMIT_S)
        offset, deadline = self.offset, time.monotonic() + RETRY_LIMIT_S
        while not stop.is_set():
            # Checked before the stream, so that the last output of an ended job is not missed.
            was_ended = broker.get_job(self.job.id).is_ended
            begin = offset
            try:
                with self.context.transfer.open_logs(
                    self.job.id, offset=offset, follow=True, rank=self.rank, silence_s=SILENCE_S
                ) as response:
                    deadline = time.monotonic() + RETRY_LIMIT_S
                    while (data := response.read()) and not stop.is_set():
                        offset += len(data)
                        events.put(data)
                if was_ended and offset == begin:
                    return
            except BrokerError as error:
                is_away = error.status is None or error.status in RESTARTING
                if not is_away or time.monotonic() > deadline:
                    raise
            if offset == begin:
                stop.wait(_RETRY_S)


def describe_state(job: models.Job) -> str:
    """Describe the job's state in one line; empty if there is nothing to show."""
    match job.state:
        case models.WAITING:
            queue_state = render.format_queue_state(job, datetime.now(UTC))
            prefix = "preempted, " if job.preemptions else ""
            prefix += f"try {job.retries + 1} of {job.max_retries + 1}, " if job.retries else ""
            return f"{prefix}waiting for GPUs{queue_state}"
        case models.STARTING:
            return f"starting on {render.format_nodes(job.workers, '')}"
        case models.RUNNING:
            return _describe_running(job)
        case models.PREEMPTING:
            return "others need the GPUs: the job can write a checkpoint, then it waits again"
        case models.STOPPING:
            return "stopping"
    return ""


def _describe_running(job: models.Job) -> str:
    if job.suspension:
        queue_state = render.format_queue_state(job, datetime.now(UTC))
        return f"suspended, others have its GPU: it continues with what it has computed{queue_state}"
    return f"running on {render.format_nodes(job.workers, '')}" + (f" ({job.note})" if job.note else "")
