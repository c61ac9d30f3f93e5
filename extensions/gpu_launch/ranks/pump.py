"""Sends what a node's ranks say and do to the notebook: output, signs of life, failures, how it ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from signal import SIGKILL
from typing import Any

from gpu_launch.output import Writer
from gpu_launch.ranks import logs, memory
from gpu_launch.ranks.gpus import Gpus
from gpu_launch.ranks.progress import Progress
from gpu_launch.ranks.runner import End, Node, Runner
from gpu_launch.spec import RankEnd
from gpu_launch.tail import CHUNK, Tail

_POLL_S = 0.02  # seconds between looks at the log files
_BEAT_S = 1.0  # seconds between signs of life
_SEND_MS = 500  # a notebook that takes nothing for so long is asked again, until the agent gives it up
_TRACEBACK = "Traceback (most recent call last):"


class Pump:
    """One start's."""

    def __init__(self, runner: Runner, node: Node, gpus: Gpus, *, is_leaving: Callable[[], bool]) -> None:
        self._runner, self._node, self._gpus, self._is_leaving = runner, node, gpus, is_leaving
        self._tail = Tail(
            node.logs,
            run_id=node.spec.run_id,
            first_rank=node.ranks.start,
            processes=node.processes,
            whole=node.spec.whole,
        )
        self._progress = Progress(node.run, node.ranks)
        self._oom_kills = memory.oom_kills()
        self._has_told = False
        self._beat_at = 0.0
        self._reading = 0
        #: The notebook is not waited for any more.
        self.given_up = threading.Event()

    def run(self) -> None:
        """Until the ranks have ended and all is sent, or the agent gives the notebook up."""
        writer = Writer(self._node.spec.channel)
        self._gpus.begin()
        try:
            while (code := self._runner.poll()) is None and not self.given_up.is_set():
                if not self._step(writer):
                    self._runner.wait(_POLL_S)
            self._fail(writer)
            while entries := self._tail.read(everything=True):
                self._send(writer, "output", entries=entries)
            # What was reported after the last look.
            for told in self._progress.news(float("inf")):
                self._send(writer, "progress", **told)
            if code is not None:
                ends = [asdict(self._rank_end(end)) for end in self._runner.ends()]
                self._send(writer, "exit", code=code, ends=ends, said=self._runner.said())
        finally:
            self._gpus.end()
            self._tail.close()
            writer.close()

    def _step(self, writer: Writer) -> bool:
        """Send what there is; whether there is more, and nothing to wait for."""
        self._fail(writer)
        entries, now = self._tail.read(), time.monotonic()
        if entries or now - self._beat_at >= _BEAT_S:
            self._beat_at = now
            self._send(writer, "output", entries=entries)
        for told in self._progress.news(now):
            self._send(writer, "progress", **told)
        number, readings = self._gpus.latest(self._reading)
        if number != self._reading:
            self._reading = number
            self._send(writer, "gpus", readings=readings)
        # Not before a good part of it has come: as many messages as lines would cost the ranks a core.
        return any(len(entry[3] or "") > CHUNK // 2 for entry in entries)

    def _fail(self, writer: Writer) -> None:
        """Tell of failures, and before them that this container is to end: they may come of it."""
        if self._is_leaving() and not self._has_told:
            self._has_told = True
            self._send(writer, "leaving")
        for end in self._runner.failures():
            self._send(writer, "failed", end=asdict(self._rank_end(end)))

    def _send(self, writer: Writer, kind: str, **content: Any) -> None:
        node = self._node
        message = {"kind": kind, "node_rank": node.node_rank, "node": node.name, "attempt": node.spec.attempt} | content
        while not writer.send(message, wait_ms=_SEND_MS) and not self.given_up.is_set():
            pass

    def _rank_end(self, end: End) -> RankEnd:
        tail, written_at_ns = self._tail.end_of(end.rank)
        local_rank = end.rank - self._node.ranks.start
        kills = memory.oom_kills() if end.code == -SIGKILL else None
        # What Python wrote has none of our own frames.
        error = tail if _TRACEBACK in tail or not end.recorded else end.recorded
        is_oom = kills is not None and kills > (self._oom_kills or 0)
        return RankEnd(
            rank=end.rank,
            node=self._node.name,
            exit_code=end.code,
            error=error or (logs.find_full(self._node.logs) if end.code else ""),
            at_ns=end.at_ns or written_at_ns,
            gpu=self._gpus.name(local_rank, self._node.environ),
            is_out_of_memory=is_oom,
            memory_limit_mib=memory.limit_mib() if is_oom else 0,
        )
