"""Forwards the output, heartbeats, progress, failures and exits of a node's ranks to the notebook.

A failure comes with the container's memory limit if the kernel's out-of-memory killer caused it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from signal import SIGKILL
from typing import Any

from gpu_launch.common.launch_spec import RankEnd
from gpu_launch.common.run_folder import RunFolder
from gpu_launch.common.secure_channel import OutputSender
from gpu_launch.worker import log_files
from gpu_launch.worker.display_files import DisplayFiles
from gpu_launch.worker.gpu_monitor import GpuMonitor
from gpu_launch.worker.log_files import CHUNK, LogTail
from gpu_launch.worker.rank_stops import StopFiles
from gpu_launch.worker.runners.base import NodeSpec, ProcessExit, Runner

#: Seconds between polls of the files.
PERIOD_S = 0.5
_FIELDS = ("step", "total", "text", "metrics")
_POLL_S = 0.02  # seconds between polls of the log files
_HEARTBEAT_S = 1.0  # seconds between heartbeats
_SEND_MS = 500  # a notebook that receives nothing for this time is tried again, until the agent abandons it
_TRACEBACK = "Traceback (most recent call last):"
_CGROUPS = Path("/sys/fs/cgroup")
_MIB = 1024**2
_UNLIMITED = 2**60  # bytes


class OutputForwarder:
    """Forwards the output of one start."""

    def __init__(
        self,
        runner: Runner,
        node: NodeSpec,
        gpus: GpuMonitor,
        *,
        is_terminating: Callable[[], bool],
        stops: StopFiles,
    ) -> None:
        self._runner, self._node, self._gpus, self._is_terminating = runner, node, gpus, is_terminating
        self._stops = stops
        self._tail = LogTail(
            node.logs,
            run_id=node.spec.run_id,
            first_rank=node.ranks.start,
            processes=node.processes,
            unlimited=node.spec.unlimited_output,
        )
        self._progress = ProgressFiles(node.run, node.ranks)
        self._displays = DisplayFiles(
            node.run, node.ranks if node.spec.displays else (), is_only_rank=node.spec.membership.ranks == 1
        )
        self._oom_kills = count_oom_kills()
        self._has_announced_shutdown = False
        self._heartbeat_at = 0.0
        self._reading_number = 0
        #: Set when the agent stops waiting for the notebook.
        self.abandoned = threading.Event()

    def run(self) -> None:
        """Forward until the ranks have ended and all output is sent, or until `abandoned` is set."""
        sender = OutputSender(self._node.spec.channel)
        self._gpus.start()
        try:
            while (code := self._runner.poll()) is None and not self.abandoned.is_set():
                if not self._forward(sender):
                    self._runner.wait(_POLL_S)
            self._send_failures(sender)
            self._send_displays(sender, everything=True)
            while entries := self._tail.read(everything=True):
                self._send(sender, "output", entries=entries)
            # Progress that was reported after the last poll.
            for progress in self._progress.read_changes(float("inf")):
                self._send(sender, "progress", **progress)
            if code is not None:
                ends = [asdict(self._rank_end(end)) for end in self._runner.exits()]
                self._send(sender, "exit", code=code, ends=ends, note=self._runner.failure_note())
        finally:
            self._gpus.stop()
            self._tail.close()
            self._displays.close()
            sender.close()

    def _forward(self, sender: OutputSender) -> bool:
        """Send new output, progress and GPU readings; return whether more output is waiting."""
        self._send_failures(sender)
        # Before the output that follows them.
        self._send_displays(sender)
        entries, now = self._tail.read(), time.monotonic()
        if entries or now - self._heartbeat_at >= _HEARTBEAT_S:
            self._heartbeat_at = now
            self._send(sender, "output", entries=entries)
        for progress in self._progress.read_changes(now):
            self._send(sender, "progress", **progress)
        for stop in self._stops.read_new(now):
            self._send(sender, "stopped", **stop)
        number, readings = self._gpus.latest(self._reading_number)
        if number != self._reading_number:
            self._reading_number = number
            self._send(sender, "gpus", readings=readings)
        # Wait until a good part of a chunk is there: one message a line would cost the ranks a core.
        return any(len(entry[3] or "") > CHUNK // 2 for entry in entries)

    def _send_failures(self, sender: OutputSender) -> None:
        """Send failures, after the notice that this container is terminating: they may follow from it."""
        if self._is_terminating() and not self._has_announced_shutdown:
            self._has_announced_shutdown = True
            self._send(sender, "leaving")
        for end in self._runner.new_failures():
            self._send(sender, "failed", end=asdict(self._rank_end(end)))

    def _send_displays(self, sender: OutputSender, *, everything: bool = False) -> None:
        for found in self._displays.read(everything=everything):
            self._send(sender, "display", rank=found.rank, display=found.display, count=found.count)

    def _send(self, sender: OutputSender, kind: str, **content: Any) -> None:
        node = self._node
        message = {"kind": kind, "node_rank": node.node_rank, "node": node.name, "attempt": node.spec.attempt} | content
        while not sender.send(message, wait_ms=_SEND_MS) and not self.abandoned.is_set():
            pass

    def _rank_end(self, end: ProcessExit) -> RankEnd:
        tail, written_at_ns = self._tail.read_stderr_end(end.rank)
        local_rank = end.rank - self._node.ranks.start
        kills = count_oom_kills() if end.code == -SIGKILL else None
        # A traceback that Python wrote does not contain frames of gpu_launch.
        error = tail if _TRACEBACK in tail or not end.traceback else end.traceback
        is_oom = kills is not None and kills > (self._oom_kills or 0)
        return RankEnd(
            rank=end.rank,
            node=self._node.name,
            exit_code=end.code,
            error=error or (log_files.describe_full_disk(self._node.logs) if end.code else ""),
            at_ns=end.at_ns or written_at_ns,
            gpu=self._gpus.describe_gpu(local_rank, self._node.environ),
            is_out_of_memory=is_oom,
            memory_limit_mib=read_memory_limit_mib() if is_oom else 0,
        )


class ProgressFiles:
    """Follows the ranks' progress files, after removing old ones."""

    def __init__(self, run: RunFolder, ranks: Sequence[int]) -> None:
        self._files = {rank: run.progress_file(rank) for rank in ranks}
        self._seen: dict[int, tuple[int, int]] = {}
        self._due_at = 0.0
        for file in self._files.values():
            file.unlink(missing_ok=True)

    def read_changes(self, now: float) -> list[dict[str, Any]]:
        """Return the progress of ranks whose file has changed, at most twice a second."""
        if now < self._due_at:
            return []
        self._due_at = now + PERIOD_S
        changes = (self._read_change(rank) for rank in self._files)
        return [progress for progress in changes if progress is not None]

    def _read_change(self, rank: int) -> dict[str, Any] | None:
        try:
            stat = self._files[rank].stat()
            if self._seen.get(rank) == (key := (stat.st_mtime_ns, stat.st_ino)):
                return None
            progress = json.loads(self._files[rank].read_text())
        except (OSError, ValueError):
            return None
        self._seen[rank] = key
        if not isinstance(progress, dict):
            return None
        return {"rank": rank} | {name: progress.get(name) for name in _FIELDS}


def count_oom_kills(cgroups: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> int | None:
    """Return the number of out-of-memory kills so far, None if it cannot be read."""
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return None
    paths = [
        path for line in lines for path in _list_cgroup_files(line, root, v2="memory.events", v1="memory.oom_control")
    ]
    counts = map(_read_oom_kills, paths)
    return next((count for count in counts if count is not None), None)


def read_memory_limit_mib(cgroups: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> int:
    """Return the container's memory limit in MiB, 0 if it has none or it cannot be read."""
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        for path in _list_cgroup_files(line, root, v2="memory.max", v1="memory.limit_in_bytes"):
            try:
                text = path.read_text().strip()
            except OSError:
                continue
            # Version 1 writes "no limit" as a number larger than any machine's memory.
            return int(text) // _MIB if text.isdecimal() and int(text) < _UNLIMITED else 0
    return 0


def _list_cgroup_files(line: str, root: Path, *, v2: str, v1: str) -> list[Path]:
    """Return the possible files of one line of /proc/self/cgroup: `0::/docker/4f` or `4:memory:/docker/4f`.

    A container usually sees its own group mounted at the root, whatever the line's path.
    """
    _, controllers, path = line.split(":", 2)
    own = path.lstrip("/")
    if not controllers:
        return [root / own / v2, root / v2]
    if "memory" in controllers.split(","):
        return [root / "memory" / own / v1, root / "memory" / v1]
    return []


def _read_oom_kills(path: Path) -> int | None:
    """Read the count from the line `oom_kill 3` of a file."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    return next((int(line[1]) for line in words if len(line) == 2 and line[0] == "oom_kill"), None)
