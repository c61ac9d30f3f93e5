"""Predicted and measured steps of a training on GPUs of this machine, with a slow network between them.

`python -m tests.gpus.prediction [MBIT …]`, as root, with two GPUs or more, a Python with a CUDA build of torch and torchft,
and the commands `ip` and `tc`. Each rank has one GPU and a link of that speed. `%gpu_bench` measures, `--predict` profiles
the script on one GPU, then the script trains on one GPU, and in every mode on all.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from gpu_launch.prediction import bench_main, figures, step_profiler
from gpu_launch.training.comm_modes import LOCAL_PERIOD, PERIODS, VARIABLE, CommMode
from tests.gpus.shaped_nodes import run_on_nodes, shaped_nodes
from tests.support.launch import gpt_script, short_warm_up
from tests.support.launch.step_times import read_step_time, sum_parts

RATES_MBIT = (2500, 10_000)
BATCH, SKIPPED, COUNTED = 48, 5, 15
#: A prediction may be wrong by this factor.
TOLERANCE = 0.1
_KEY = "gpus"


def time_step(home: Path, ranks: int, mode: CommMode) -> float:
    """Return the seconds of a step."""
    skipped = short_warm_up.STEPS + LOCAL_PERIOD if mode in (CommMode.POWERSGD, CommMode.LOCAL) else SKIPPED
    counted = 2 * LOCAL_PERIOD if mode is CommMode.LOCAL else PERIODS.get(mode, COUNTED)
    file = home / "steps.json"
    script = [gpt_script.__file__, str(file), str(skipped + counted), str(BATCH)]
    run_on_nodes(["-m", short_warm_up.__name__, *script], ranks, {"HOME": str(home), VARIABLE: mode})
    return read_step_time(file, mode, skipped)


def compare(rate_mbit: int, home: Path) -> None:
    """Print prediction and measurement of every mode, and check the prediction."""
    cards = torch.cuda.device_count()
    with shaped_nodes(cards, rate_mbit):
        print(f"{rate_mbit} Mbit/s\n{run_on_nodes(['-m', bench_main.__name__], cards, {'HOME': str(home)})[0].stdout}")
        script = [gpt_script.__file__, str(home / "steps.json"), "1000", str(BATCH)]
        print(run_on_nodes(script, 1, {"HOME": str(home), step_profiler.VARIABLE: _KEY})[0].stdout)
        kept = json.loads(figures.get_prediction_path(home, _KEY).read_text())
        errors = []
        for step in kept["steps"]:
            ranks, mode = len(step["cards"]), CommMode(step["mode"])
            if ranks not in (1, cards):
                continue
            predicted_s, measured_s = sum_parts(step), time_step(home, ranks, mode)
            errors.append(abs(predicted_s / measured_s - 1))
            print(
                f"{ranks} GPUs, {mode}: predicted {predicted_s * 1000:.1f} ms, measured {measured_s * 1000:.1f} ms, "
                f"error {errors[-1]:.1%}",
                flush=True,
            )
    assert max(errors) < TOLERANCE, "a prediction is wrong by more"


def main() -> None:
    """Compare with networks of each speed."""
    for rate_mbit in map(int, sys.argv[1:] or RATES_MBIT):
        with tempfile.TemporaryDirectory() as home:
            compare(rate_mbit, Path(home))


if __name__ == "__main__":
    main()
