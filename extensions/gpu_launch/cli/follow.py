"""Following a job: its place while it waits, its output while it runs, its end. Restarts of the hub are waited out."""

from __future__ import annotations

import codecs
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gpu_launch import render, wire
from gpu_launch.cli.connection import RESTARTING
from gpu_launch.cli.context import Context
from gpu_launch.errors import BrokerError

#: A restart of hub, proxy or broker is waited out for this long, seconds.
PATIENCE_S = 600.0
#: A stream that is silent for so long may be dead, after the laptop slept, say: it is opened anew, seconds.
SILENCE_S = 60.0
#: How often a person's Ctrl-C is looked for where nothing else wakes us, seconds. Windows needs it.
_TICK_S = 0.25
_RETRY_S = 1.0  # seconds
_LONG_POLL_S = 20.0


_Events = queue.SimpleQueue[bytes | wire.Job | BaseException | None]
_Target = Callable[[threading.Event, _Events], None]


@dataclass
class Follower:
    """One job, followed to its end."""

    context: Context
    job: wire.Job
    #: One rank's output alone; None for what the job shows.
    rank: int | None = None
    #: Bytes of the output that have been shown.
    offset: int = 0
    _events: _Events = field(default_factory=queue.SimpleQueue)
    _stop: threading.Event = field(default_factory=threading.Event)
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def run(self) -> wire.Job:
        """The job when it has ended and all its output is shown. Raises BrokerError; KeyboardInterrupt leaves it as it
        is, and `run` may be called again.
        """
        self._stop = threading.Event()
        self._events = queue.SimpleQueue()
        threads = [
            threading.Thread(target=self._in_thread, args=(target, self._stop, self._events), daemon=True)
            for target in (self._watch, self._read)
        ]
        for thread in threads:
            thread.start()
        running = len(threads)
        try:
            while running:
                event = self._next()
                if event is None:
                    running -= 1
                elif isinstance(event, BaseException):
                    raise event
                elif isinstance(event, bytes):
                    self._show(event)
                else:
                    self._tell(event)
        finally:
            self._stop.set()
        self._show(b"", final=True)
        self.context.said.end_line()
        return self.job

    def _next(self) -> bytes | wire.Job | BaseException | None:
        while True:
            # A wait without limit would not be interrupted by Ctrl-C on Windows.
            with contextlib.suppress(queue.Empty):
                return self._events.get(timeout=_TICK_S)

    def _show(self, data: bytes, *, final: bool = False) -> None:
        self.offset += len(data)
        text = self._decoder.decode(data, final=final)
        if text:
            self.context.said.output(text)

    def _tell(self, job: wire.Job) -> None:
        """What changed, in a line."""
        old, self.job = self.job, job
        if job.is_ended:
            return
        text = place_text(job)
        if text and text != place_text(old):
            self.context.said.note(f"gpu-launch: {text}")

    def _in_thread(self, target: _Target, stop: threading.Event, events: _Events) -> None:
        try:
            target(stop, events)
            events.put(None)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the main thread raises it
            events.put(error)

    def _watch(self, stop: threading.Event, events: _Events) -> None:
        """Every change of the job, to its end."""
        broker = self.context.patient_broker(PATIENCE_S)
        job = self.job
        while not job.is_ended and not stop.is_set():
            new = broker.job(job.id, version=job.version, wait_s=_LONG_POLL_S)
            self.context.answers_again()
            if new.version != job.version:
                events.put(new)
            job = new

    def _read(self, stop: threading.Event, events: _Events) -> None:
        """All output, from where it was shown to; a stream that breaks off goes on from there."""
        broker = self.context.patient_broker(PATIENCE_S)
        offset, deadline = self.offset, time.monotonic() + PATIENCE_S
        while not stop.is_set():
            # Looked at before the stream, so that what an ended job wrote at last is not missed.
            was_ended = broker.job(self.job.id).is_ended
            begin = offset
            try:
                with self.context.transfer.logs(
                    self.job.id, offset=offset, follow=True, rank=self.rank, silence_s=SILENCE_S
                ) as answer:
                    deadline = time.monotonic() + PATIENCE_S
                    while (data := answer.read()) and not stop.is_set():
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


def place_text(job: wire.Job) -> str:
    """Where a job is, in a line for a person; empty where there is nothing to say."""
    match job.state:
        case wire.WAITING:
            place = render.place_text(job, datetime.now(UTC))
            again = "preempted, " if job.preemptions else ""
            return f"{again}waiting for GPUs{place}"
        case wire.STARTING:
            return f"starting on {render.nodes_text(job.workers, '')}"
        case wire.RUNNING:
            return f"running on {render.nodes_text(job.workers, '')}" + (f" ({job.note})" if job.note else "")
        case wire.PREEMPTING:
            return "others need the GPUs: the job may write a checkpoint, and waits again"
        case wire.STOPPING:
            return "stopping"
    return ""
