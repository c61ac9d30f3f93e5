"""Reads the output and status of a detached job."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import BinaryIO

from gpu_launch.courier.files import resolve_path
from gpu_launch.courier.protocol import CourierError

_BLOCK = 256 * 1024
#: Seconds between polls of a growing log.
_POLL_S = 0.25


def resolve_run_folder(home: Path, run: str) -> Path:
    """Return the path of a run's folder."""
    return resolve_path(home, f".gpu_launch/jobs/{run}")


class GrowingLog:
    """Reads a file that may not exist yet. It is opened for each read, so that NFS shows new data."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset

    def copy_new(self, sink: BinaryIO) -> bool:
        """Write the new data; return whether there was any."""
        begin = self._offset
        try:
            with self.path.open("rb") as file:
                file.seek(begin)
                while data := file.read(_BLOCK):
                    sink.write(data)
                    self._offset += len(data)
        except FileNotFoundError:
            return False
        return self._offset > begin


class RunLogs:
    """All output of a run, or one rank's stdout and stderr of the latest start, from byte `offset` on."""

    def __init__(self, folder: Path, *, offset: int, rank: int | None, per_node: int) -> None:
        self._folder, self._rank, self._per_node, self._skip = folder, rank, per_node, offset
        self._logs = {path: GrowingLog(path, offset) for path in ([folder / "output.log"] if rank is None else [])}

    def copy_new(self, sink: BinaryIO) -> bool:
        """Write the new data; return whether there was any."""
        if self._rank is not None:
            for path in find_rank_logs(self._folder, self._rank, self._per_node):
                if path not in self._logs:
                    self._logs[path] = GrowingLog(path, self._skip)
                    self._skip = max(0, self._skip - path.stat().st_size)
        copied = [log.copy_new(sink) for log in self._logs.values()]
        sink.flush()
        return any(copied)


def find_rank_logs(folder: Path, rank: int, per_node: int) -> list[Path]:
    """Return the existing log files of a rank's latest start.

    They are `logs/node1/<start>/attempt_0/0/stdout.log` and `stderr.log`, below `node1-restart2` after the second
    restart.
    """
    node, local = divmod(rank, per_node)
    paths = [
        path
        for node_folder in (f"node{node}", f"node{node}-restart*")
        for path in folder.glob(f"logs/{node_folder}/*/attempt_*/{local}/std*.log")
    ]
    started = {path.parent: path.parent.stat().st_mtime_ns for path in paths}
    latest = max(started, key=lambda folder_path: started[folder_path], default=None)
    return sorted((path for path in paths if path.parent == latest), reverse=True)


def follow(logs: RunLogs, sink: BinaryIO, is_over: threading.Event) -> None:
    """Write new data until `is_over` is set, then the rest."""
    while not is_over.wait(0 if logs.copy_new(sink) else _POLL_S):
        pass
    while logs.copy_new(sink):
        pass


def read_state(folder: Path) -> bytes:
    """Return the status of a detached job.

    Raises:
        CourierError: The job has not written it yet.
    """
    try:
        return (folder / "state.json").read_bytes()
    except FileNotFoundError:
        raise CourierError("not-found", "the job has not written its status yet") from None
