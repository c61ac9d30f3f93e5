"""Steps of a training as `--predict` foresees them and as a script writes them down, for comparisons of both."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_launch.training.comm_modes import PERIODS, CommMode

_PARTS = ("input_s", "compute_s", "compress_s", "exposed_s", "update_s")


def sum_parts(step: Mapping[str, Any]) -> float:
    """Return the seconds of a predicted step, as its file has it."""
    return float(sum(step[part] for part in _PARTS))


def read_step_time(file: Path, mode: CommMode, skipped: int) -> float:
    """Return the seconds of a measured step after `skipped` ones, whose times the script wrote as JSON.

    That is the median, or the mean where one step in some exchanges all parameters.
    """
    times = json.loads(file.read_text(encoding="utf-8"))[skipped:]
    return float(statistics.fmean(times) if mode in PERIODS else statistics.median(times))
