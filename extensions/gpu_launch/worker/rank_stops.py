"""Files in which ranks note that they have stopped for a debugger, and why."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: A rank's file is that of its stack dump, with this suffix; it exists while the rank waits.
SUFFIX = ".stop"
_POLL_S = 0.2  # seconds between two polls for stops


@dataclass(frozen=True, kw_only=True)
class RankStop:
    """Why and where a rank has stopped; `reason` is `breakpoint`, `exception` or `attach`."""

    reason: str
    #: Such as `train.py:12 in step`.
    place: str
    #: The exception's last line; empty for other reasons.
    detail: str = ""


class StopFiles:
    """Notices ranks that begin to wait for a debugger that was not requested."""

    def __init__(self, pattern: str, ranks: Sequence[int]) -> None:
        """`pattern` is the path of a rank's stack dump, with `{rank}`."""
        self._files = {rank: Path(pattern.replace("{rank}", str(rank)) + SUFFIX) for rank in ranks}
        self._seen: dict[int, int] = {}
        self._due_at = 0.0

    def read_new(self, now: float) -> list[dict[str, Any]]:
        """Return the new stops, each with its rank and the fields of `RankStop`; at most some times a second."""
        if now < self._due_at:
            return []
        self._due_at = now + _POLL_S
        found = []
        for rank, file in self._files.items():
            with contextlib.suppress(OSError):
                written = file.stat().st_mtime_ns
                if self._seen.get(rank) == written:
                    continue
                self._seen[rank] = written
                stop = read_stop(file)
                if stop is not None and stop.reason != "attach":
                    found.append({"rank": rank, **asdict(stop)})
        return found


def read_stop(path: Path) -> RankStop | None:
    """Return what a rank's file of this path says; None if the rank does not wait for a debugger."""
    try:
        return RankStop(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
