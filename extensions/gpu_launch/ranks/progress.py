"""How far a node's ranks are, as their scripts tell with `gpu_launch.report`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gpu_launch.runs import RunFolder

#: Seconds between looks at the files.
PERIOD_S = 0.5
_FIELDS = ("step", "total", "text", "metrics")


class Progress:
    """Follows the ranks' files, beginning with none."""

    def __init__(self, run: RunFolder, ranks: Sequence[int]) -> None:
        self._files = {rank: run.progress(rank) for rank in ranks}
        self._seen: dict[int, tuple[int, int]] = {}
        self._due_at = 0.0
        for file in self._files.values():
            file.unlink(missing_ok=True)

    def news(self, now: float) -> list[dict[str, Any]]:
        """What has changed, twice a second at most."""
        if now < self._due_at:
            return []
        self._due_at = now + PERIOD_S
        found = (self._look(rank) for rank in self._files)
        return [told for told in found if told is not None]

    def _look(self, rank: int) -> dict[str, Any] | None:
        try:
            stat = self._files[rank].stat()
            if self._seen.get(rank) == (key := (stat.st_mtime_ns, stat.st_ino)):
                return None
            told = json.loads(self._files[rank].read_text())
        except (OSError, ValueError):
            return None
        self._seen[rank] = key
        if not isinstance(told, dict):
            return None
        return {"rank": rank} | {name: told.get(name) for name in _FIELDS}
