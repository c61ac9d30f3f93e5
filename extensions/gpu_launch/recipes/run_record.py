"""What a recipe's program leaves in the job's folder: parameters, metrics, a chart of the loss, the result."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

#: The variables with the recipe's name, and with the values of its parameters (JSON).
NAME, PARAMETERS = "RECIPE_NAME", "RECIPE_PARAMETERS"
METRICS, RESULT, CHART = "metrics.jsonl", "result.json", "loss.png"


class RunRecord:
    """The files of one run in a folder; a run that starts again continues them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write_parameters(self, arguments: Mapping[str, Any]) -> None:
        """Write the recipe's parameters, or `arguments` where the program was not started as a recipe."""
        values = json.loads(os.environ.get(PARAMETERS) or "null") or {
            name: value if isinstance(value, int | float | str) else str(value) for name, value in arguments.items()
        }
        self._replace("parameters.json", json.dumps(values, indent=1, ensure_ascii=False))

    def continue_from(self, step: int) -> None:
        """Remove the metrics of later steps, which come again."""
        kept = [line for line in self.read_metrics() if line["step"] <= step]
        self._replace(METRICS, "".join(f"{json.dumps(line)}\n" for line in kept))

    def append(self, **metrics: float) -> None:
        """Append a line of metrics, one of which is the `step`."""
        with (self._folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(metrics)}\n")

    def read_metrics(self) -> list[dict[str, float]]:
        """Return the metrics so far, without lines that a kill has cut off."""
        try:
            text = (self._folder / METRICS).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        metrics = []
        for line in text.splitlines():
            with suppress(json.JSONDecodeError):
                metrics.append(json.loads(line))
        return metrics

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the result as JSON, and print it."""
        self._replace(RESULT, json.dumps(result, indent=1, ensure_ascii=False))
        write_line(json.dumps(result, indent=1, ensure_ascii=False))

    def draw_losses(self) -> None:
        """Draw the losses of the metrics by step, as a PNG."""
        metrics = self.read_metrics()
        curves = {
            label: [(line["step"], line[name]) for line in metrics if name in line]
            for label, name in (("training", "loss"), ("held out", "held_out_loss"))
        }
        draw_curves(self._folder / CHART, curves, x="step", y="loss")

    def _replace(self, name: str, text: str) -> None:
        draft = self._folder / f".{name}.{secrets.token_hex(4)}"
        draft.write_text(text, encoding="utf-8")
        draft.replace(self._folder / name)


def write_line(text: str) -> None:
    """Write a line into the job's output at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def draw_curves(
    path: Path, curves: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str, is_logarithmic: bool = False
) -> None:
    """Draw curves with their labels into an image; a curve of one point is a point.

    Args:
        path: The image, in the format of its ending.
        curves: Points of each curve by its label.
        x: Label of the horizontal axis.
        y: Label of the vertical axis.
        is_logarithmic: Points in any order over a logarithmic horizontal axis, without lines between them.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for label, points in curves.items():
        if points:
            line = "none" if is_logarithmic else "-"
            marker = "o" if is_logarithmic or len(points) < 60 else ""
            axes.plot(*zip(*points, strict=True), label=label, linestyle=line, marker=marker, markersize=3)
    axes.set(xlabel=x, ylabel=y)
    if is_logarithmic:
        axes.set_xscale("log")
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=120)
