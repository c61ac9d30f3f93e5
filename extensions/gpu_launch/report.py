"""`gpu_launch.report`: a script reports its progress, for the bar in the notebook."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

#: The variable with the path of this rank's progress file; set in ranks of a launch only.
PATH = "GPU_LAUNCH_PROGRESS"
_LEAST_S = 0.2  # seconds between two writes


class ProgressWriter:
    """A writer of one file, as a whole and at most five times a second; the last step is always written."""

    def __init__(self, path: str) -> None:
        self._path, self._process = path, os.getpid()
        self._due_at = 0.0

    def writes_to(self, path: str) -> bool:
        """Return whether it writes to this path in this process: a forked process needs its own."""
        return self._path == path and self._process == os.getpid()

    def write(self, step: int, total: int | None, text: str, metrics: dict[str, Any]) -> None:
        """Write the progress, if it is time to."""
        now = time.monotonic()
        if now < self._due_at and step != total:
            return
        self._due_at = now + _LEAST_S
        progress = {
            "step": int(step),
            "total": None if total is None else int(total),
            "text": str(text),
            "metrics": {name: _plain(value) for name, value in metrics.items()},
        }
        try:
            draft = Path(f"{self._path}.{self._process}")
            draft.write_text(json.dumps(progress), encoding="utf-8")
            draft.replace(self._path)
        except OSError:
            # A full disk or a removed folder must not end a training.
            self._due_at = math.inf


_reporter: ProgressWriter | None = None


def report(step: int, total: int | None = None, text: str = "", **metrics: Any) -> None:
    """Report the progress of this rank: `gpu_launch.report(step, total, loss=loss)`. Cheap enough for every step.

    `total` is the last step's number; with it the notebook shows a bar and the time left. `text` and the metrics
    (numbers, or tensors with one) are shown next to it. A tensor is read only when it is written, at most five times a
    second. Outside a launch nothing happens.
    """
    global _reporter  # noqa: PLW0603 - one file a process
    path = os.environ.get(PATH)
    if not path:
        return
    # torchrun starts all ranks with the same value.
    path = path.replace("{rank}", os.environ.get("RANK", "0"))
    if _reporter is None or not _reporter.writes_to(path):
        _reporter = ProgressWriter(path)
    _reporter.write(step, total, text, metrics)


def _plain(value: Any) -> Any:
    """Return a number, from a tensor too, else the value's text. JSON has no numbers that are not finite."""
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)
    return number if math.isfinite(number) else str(number)
