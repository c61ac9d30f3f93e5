"""What a detached job wrote, and where it says it is."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import BinaryIO

from gpu_launch.courier.files import below
from gpu_launch.courier.frames import Refused

_BLOCK = 256 * 1024
#: Between two looks at a log that grows, seconds.
_LOOK_S = 0.25


def run_folder(home: Path, run: str) -> Path:
    """A run's folder."""
    return below(home, f".gpu_launch/jobs/{run}")


class Log:
    """A file that may not be there yet, read from a place on. Opened anew each time: so NFS shows what is new."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset

    def copy(self, sink: BinaryIO) -> bool:
        """Write what is new; whether there was anything."""
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


class Logs:
    """A run's whole output, or what one rank wrote on stdout and stderr in the latest start; from byte `offset` on."""

    def __init__(self, folder: Path, *, offset: int, rank: int | None, per_node: int) -> None:
        self._folder, self._rank, self._per_node, self._skip = folder, rank, per_node, offset
        self._logs = {path: Log(path, offset) for path in ([folder / "output.log"] if rank is None else [])}

    def copy(self, sink: BinaryIO) -> bool:
        """Write what is new; whether there was anything."""
        if self._rank is not None:
            for path in rank_logs(self._folder, self._rank, self._per_node):
                if path not in self._logs:
                    self._logs[path] = Log(path, self._skip)
                    self._skip = max(0, self._skip - path.stat().st_size)
        copied = [log.copy(sink) for log in self._logs.values()]
        sink.flush()
        return any(copied)


def rank_logs(folder: Path, rank: int, per_node: int) -> list[Path]:
    """A rank's stdout and stderr in the latest start, where they are:
    `logs/node1/<start>/attempt_0/0/stdout.log`, and below `node1-restart2` after the second restart.
    """
    node, local = divmod(rank, per_node)
    found = [
        path
        for again in (f"node{node}", f"node{node}-restart*")
        for path in folder.glob(f"logs/{again}/*/attempt_*/{local}/std*.log")
    ]
    started = {path.parent: path.parent.stat().st_mtime_ns for path in found}
    latest = max(started, key=lambda one: started[one], default=None)
    return sorted((path for path in found if path.parent == latest), reverse=True)


def follow(logs: Logs, sink: BinaryIO, is_over: threading.Event) -> None:
    """Write what comes until `is_over`, and then the rest."""
    while not is_over.wait(0 if logs.copy(sink) else _LOOK_S):
        pass
    while logs.copy(sink):
        pass


def read_state(folder: Path) -> bytes:
    """A detached job's state. Raises Refused while there is none."""
    try:
        return (folder / "state.json").read_bytes()
    except FileNotFoundError:
        raise Refused("not-found", "the job has not said anything yet") from None
