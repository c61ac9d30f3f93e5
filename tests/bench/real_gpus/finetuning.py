"""`python3 -m tests.bench.real_gpus.finetuning FOLDER [SECONDS [small] [large]]`: fine-tuning on the GPUs of a machine.

Prints `NAME VALUE UNIT` lines, for one GPU and for all (`_N` in names), over NVLink and over links of 2.5 Gbit/s:

- small: the time of a step with all weights (exact, bf16, powersgd, local), LoRA and FSDP2, and how wrong predictions of
  times and memory were;
- large: LoRA on a model of 8 billion parameters, sixteen times one sequence for a step, also over 10 and 1 Gbit/s.

It needs root, the commands `ip` and `tc`, torch, transformers, peft and click. Models have random weights. FOLDER is for
files; no run is started after SECONDS (330). `GPU_BENCH_SHAPE=tiny` and CPUs try the program itself.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from gpu_launch.prediction import cost_model, figures
from gpu_launch.prediction.memory_estimate import MemoryEstimate, compute_need
from gpu_launch.prediction.model_trace import trace_model
from gpu_launch.training.comm_modes import CommMode
from tests.bench.real_gpus.finetuning_rank import SHAPES, build_config
from tests.gpus.shaped_nodes import run_on_nodes, shaped_nodes
from tests.support.launch.launched_ranks import RankOutput, run_launched

RANKS = max(2, torch.cuda.device_count())
GBIT = 2.5
#: Method, mode and number of steps; the first ones are the most wanted.
RUNS = (
    ("lora", "exact", 24),
    ("full", "exact", 14),
    ("full", "bf16", 14),
    ("full", "powersgd", 24),
    ("full", "local", 20),
    ("fsdp", "exact", 12),
)
SLOW_STEPS = {"exact": 9, "bf16": 9, "local": 12, "powersgd": 16}


class Machine:
    """Starts ranks on this machine's GPUs, one each."""

    def __init__(self, folder: Path, *, until: float) -> None:
        self.folder, self.until = folder, until
        folder.mkdir(parents=True, exist_ok=True)
        self.shape = os.environ.get("GPU_BENCH_SHAPE", "small")

    def run(self, command: list[str], ranks: int, *, gbit: float | None = None) -> list[RankOutput] | None:
        """Run ranks to their end; return None if the time is over or one of them failed."""
        if time.monotonic() > self.until:
            print_note(f"not run, the time is over: {' '.join(command[-4:])}")
            return None
        environ = {
            "HOME": str(self.folder),
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "4" if torch.cuda.is_available() else "1",
        }
        began = time.monotonic()
        try:
            with shaped_nodes(ranks, round(gbit * 1000)) if gbit else nullcontext():
                return run_on_nodes(command, ranks, environ) if gbit else _run_here(command, ranks, environ)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            print_note(f"failed: {' '.join(command)}\n{str(error)[-2500:]}")
            return None
        finally:
            print_note(f"{time.monotonic() - began:.0f} s")

    def train(
        self, method: str, mode: str, steps: int, ranks: int, *, shape: str = "", gbit: float | None = None
    ) -> dict[str, Any] | None:
        """Return what a step took; None if it was not measured."""
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        command = [
            *("-m", "tests.bench.real_gpus.finetuning_rank", str(result)),
            *(method, mode, shape or self.shape, str(steps)),
        ]
        if self.run(command, ranks, gbit=gbit) is None:
            return None
        measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        link = f"{gbit:g} Gbit/s" if gbit else "NVLink"
        print_note(f"{method} {mode}, {ranks} GPUs, {link if ranks > 1 else '-'}: {measured}")
        return measured

    def profile(self, method: str) -> figures.StepProfile | None:
        """Return the profile that `--predict` makes on one GPU."""
        result = self.folder / "profile"
        command = ["-m", "tests.bench.real_gpus.finetuning_rank", str(result), method, "profile", self.shape, "30"]
        if self.run(command, 1) is None:
            return None
        return pickle.loads(result.read_bytes())  # type: ignore[no-any-return]

    def bench(self, gbit: float | None) -> figures.Bench | None:
        """Return what `%gpu_bench` measures."""
        outputs = self.run(["-m", "gpu_launch.prediction.bench_main"], RANKS, gbit=gbit)
        if outputs is None:
            return None
        print_note(outputs[0].stdout)
        return figures.read_bench(self.folder)


def _run_here(command: list[str], ranks: int, environ: dict[str, str]) -> list[RankOutput]:
    """Run ranks that share this machine's network and memory."""
    prefixes = [("env", f"CUDA_VISIBLE_DEVICES={rank}", "GPUHUB_NODE=rig") for rank in range(ranks)]
    outputs = run_launched(command, ranks, {"NCCL_SOCKET_IFNAME": "lo"} | environ, prefixes=prefixes)
    assert not any(rank.code for rank in outputs), outputs[0].stderr
    return outputs


def name_link(gbit: float | None) -> str:
    """Return the part of figures' names that says which link was used, such as `2g5g`."""
    return f"{gbit:g}g".replace(".", "g") if gbit else "nvlink"


def print_figure(name: str, value: float, unit: str) -> None:
    """Print a figure."""
    print(f"{name} {value:.4g} {unit}", flush=True)


def print_note(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def report_memory(machine: Machine, method: str, measured: dict[str, Any], *, shape: str = "", cards: int = 1) -> None:
    """Print measured and estimated memory of one GPU."""
    sizes = SHAPES[shape or machine.shape]
    trace = trace_model(
        build_config(sizes), batch=sizes.batch, sequence=sizes.sequence, rank=16, checkpointing=sizes.checkpointing
    )
    need = compute_need(trace, MemoryEstimate(trace, ()).compute("lora" if method == "lora" else "full").method, cards)
    name = f"gpu.memory_{method}_{shape or machine.shape}{f'_{cards}_cards' if cards > 1 else ''}"
    print_figure(f"{name}_estimated", need.total_mib, "MiB")
    print_figure(f"{name}_allocated", measured["allocated_mib"], "MiB")
    print_figure(f"{name}_reserved", measured["reserved_mib"], "MiB")
    print_figure(f"{name}_used", measured["used_mib"], "MiB")


def measure_single(machine: Machine) -> tuple[dict[str, figures.StepProfile], dict[str, float]]:
    """Measure one GPU: profiles of the two methods that DDP trains, and step times."""
    profiles, steps = {}, {}
    for method in ("full", "lora"):
        measured = machine.train(method, "exact", 24, 1)
        profile = machine.profile(method)
        if measured and profile:
            steps[method], profiles[method] = measured["step_s"], profile
            print_figure(f"gpu.step_{method}_1", measured["step_s"] * 1000, "ms")
            report_memory(machine, method, measured)
    return profiles, steps


def measure_all(
    machine: Machine, profiles: dict[str, figures.StepProfile], steps: dict[str, float], gbit: float | None
) -> None:
    """Measure all GPUs over one kind of link, and compare with the predictions."""
    bench = machine.bench(gbit)
    for method, mode, count in RUNS:
        number = SLOW_STEPS[mode] if gbit and method != "lora" else count
        measured = machine.train(method, mode, number, RANKS, gbit=gbit)
        if measured is None:
            continue
        name = f"gpu_{name_link(gbit)}.{method}_{mode}_{RANKS}"
        print_figure(f"{name}_step", measured["step_s"] * 1000, "ms")
        if single := steps.get("full" if method == "fsdp" else method):
            print_figure(f"{name}_speedup", RANKS * single / measured["step_s"], "ratio")
        if method == "fsdp" and not gbit:
            report_memory(machine, method, measured, cards=RANKS)
        if bench is not None and method in profiles:
            predicted = cost_model.predict_step(profiles[method], bench, tuple(range(RANKS)), CommMode(mode)).step_s
            print_figure(f"{name}_predicted", predicted * 1000, "ms")
            print_figure(f"{name}_error", abs(predicted / measured["step_s"] - 1) * 100, "%")


def measure_small(machine: Machine) -> None:
    """Measure one GPU and all, over both kinds of links."""
    profiles, steps = measure_single(machine)
    for gbit in (GBIT, None):
        measure_all(machine, profiles, steps, gbit)


def measure_large(machine: Machine) -> None:
    """Measure LoRA on a model that takes seconds for a step."""
    shape = "8b" if torch.cuda.is_available() else machine.shape
    single = machine.train("lora", "exact", 5, 1, shape=shape)
    if single is None:
        return
    report_memory(machine, "lora", single, shape=shape)
    runs = [(GBIT, "exact", RANKS), (GBIT, "bf16", RANKS), (10.0, "exact", RANKS), (1.0, "exact", RANKS)]
    if RANKS > 2:
        runs.append((GBIT, "exact", 2))
    for gbit, mode, ranks in runs:
        if measured := machine.train("lora", mode, 5, ranks, shape=shape, gbit=gbit):
            name = f"gpu_{name_link(gbit)}.large_lora_{mode}_{ranks}_speedup"
            print_figure(name, ranks * single["step_s"] / measured["step_s"], "ratio")


def main() -> None:
    """Measure the parts that are named, or all, as far as the time allows."""
    folder = Path(sys.argv[1]).resolve()
    machine = Machine(folder, until=time.monotonic() + float(sys.argv[2] if len(sys.argv) > 2 else 330))
    parts = {"small": measure_small, "large": measure_large}
    for part in sys.argv[3:] or parts:
        parts[part](machine)


if __name__ == "__main__":
    main()
