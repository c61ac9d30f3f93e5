"""`gpu_launch.report`: a script tells how far it is, for the bar in the notebook."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

#: Names the file of this rank's progress, in ranks of a launch only.
PATH = "GPU_LAUNCH_PROGRESS"
_LEAST_S = 0.2  # seconds between two writes


class Reporter:
    """Writes to one file, as a whole and at most five times a second; the last step is always written."""

    def __init__(self, path: str) -> None:
        self._path, self._process = path, os.getpid()
        self._due_at = 0.0

    def is_for(self, path: str) -> bool:
        """Whether it writes there, in this process: a forked one begins anew."""
        return self._path == path and self._process == os.getpid()

    def tell(self, step: int, total: int | None, text: str, metrics: dict[str, Any]) -> None:
        """Write, where it is time to."""
        now = time.monotonic()
        if now < self._due_at and step != total:
            return
        self._due_at = now + _LEAST_S
        told = {
            "step": int(step),
            "total": None if total is None else int(total),
            "text": str(text),
            "metrics": {name: _plain(value) for name, value in metrics.items()},
        }
        try:
            draft = Path(f"{self._path}.{self._process}")
            draft.write_text(json.dumps(told))
            draft.replace(self._path)
        except OSError:
            # A full disk or a removed folder is no reason for a training to end.
            self._due_at = math.inf


_reporter: Reporter | None = None


def report(step: int, total: int | None = None, text: str = "", **metrics: Any) -> None:
    """Tell how far this rank is: `gpu_launch.report(step, total, loss=loss)`. Cheap enough for every step.

    `total` is the last step's number; with it the notebook shows a bar and the time left. `text` and the metrics
    (numbers, or tensors of one) are shown beside it. A tensor is read only when it is written, at most five times a
    second. Outside a launch nothing happens.
    """
    global _reporter  # noqa: PLW0603 - one file a process
    path = os.environ.get(PATH)
    if not path:
        return
    # torchrun starts all ranks with the same value.
    path = path.replace("{rank}", os.environ.get("RANK", "0"))
    if _reporter is None or not _reporter.is_for(path):
        _reporter = Reporter(path)
    _reporter.tell(step, total, text, metrics)


def _plain(value: Any) -> Any:
    """A number where it is one or stands for one; else its text. JSON has no name for what is not finite."""
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)
    return number if math.isfinite(number) else str(number)
