"""`python3 -m tests.bench.real_gpus.finetuning FOLDER [SECONDS]`: fine-tuning on one and two real GPUs of a machine.

Prints `NAME VALUE UNIT` lines: the time of a step with full weights (exact, bf16, powersgd, local), LoRA and FSDP2, on
one GPU and on two, over NVLink and over TCP with 2.5 Gbit/s for each GPU, and how wrong predictions of times and
memory were. It needs torch, transformers, peft, click and a C compiler. The model has random weights. FOLDER is for
files; no run is started after SECONDS (330). `GPU_BENCH_SHAPE=tiny` and CPUs try the program itself.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gpu_launch.prediction import cost_model, figures
from gpu_launch.prediction.memory_estimate import MemoryEstimate, compute_need
from gpu_launch.prediction.model_trace import trace_model
from gpu_launch.training.comm_modes import CommMode
from tests.bench.real_gpus.finetuning_rank import SHAPES, build_config

ROOT = Path(__file__).parents[3]
RANKS = 2
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
        self.sockets = folder / "slow_sockets.so"
        source = Path(__file__).with_name("slow_sockets.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(self.sockets), "-ldl"], check=True)

    def run(self, command: list[str], ranks: int, *, gbit: float | None = None) -> bool:
        """Run ranks to their end; return False if the time is over or one of them failed."""
        if time.monotonic() > self.until:
            print_note(f"not run, the time is over: {' '.join(command[-4:])}")
            return False
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environ = os.environ | {
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "HOME": str(self.folder),
            "GPUHUB_NODE": "rig",
            "PYTHONPATH": f"{ROOT}:{ROOT}/extensions:{os.environ.get('PYTHONPATH', '')}",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "4" if torch.cuda.is_available() else "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if gbit:
            slow = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
            environ |= slow | {"LD_PRELOAD": str(self.sockets), "GPU_BENCH_GBIT": str(gbit)}
        processes = []
        for rank in range(ranks):
            own = environ | {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": str(rank)}
            log = (self.folder / f"rank-{rank}.log").open("wb")
            processes.append(subprocess.Popen([sys.executable, *command], env=own, cwd=ROOT, stdout=log, stderr=log))
            log.close()
        try:
            codes = [process.wait(timeout=150) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [1]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            log_text = (self.folder / "rank-0.log").read_text(encoding="utf-8", errors="replace")
            print_note(f"failed: {' '.join(command)}\n{log_text[-2500:]}")
        return not any(codes)

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
        if not self.run(command, ranks, gbit=gbit):
            return None
        measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        link = f"{gbit:g} Gbit/s" if gbit else "NVLink"
        print_note(f"{method} {mode}, {ranks} GPUs, {link if ranks > 1 else '-'}: {measured}")
        return measured

    def profile(self, method: str) -> figures.StepProfile | None:
        """Return the profile that `--predict` makes on one GPU."""
        result = self.folder / "profile"
        command = ["-m", "tests.bench.real_gpus.finetuning_rank", str(result), method, "profile", self.shape, "30"]
        if not self.run(command, 1):
            return None
        return pickle.loads(result.read_bytes())  # type: ignore[no-any-return]

    def bench(self, gbit: float | None) -> figures.Bench | None:
        """Return what `%gpu_bench` measures."""
        if not self.run(["-m", "gpu_launch.prediction.bench_main"], RANKS, gbit=gbit):
            return None
        print_note((self.folder / "rank-0.log").read_text(encoding="utf-8"))
        return figures.read_bench(self.folder)


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
    name = f"gpu.memory_{method}_{shape or machine.shape}{'_2_cards' if cards > 1 else ''}"
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


def measure_pair(
    machine: Machine, profiles: dict[str, figures.StepProfile], steps: dict[str, float], gbit: float | None
) -> None:
    """Measure two GPUs over one kind of link, and compare with the predictions."""
    tag = f"{gbit:g}g".replace(".", "g") if gbit else "nvlink"
    bench = machine.bench(gbit)
    for method, mode, count in RUNS:
        number = SLOW_STEPS[mode] if gbit and method != "lora" else count
        measured = machine.train(method, mode, number, RANKS, gbit=gbit)
        if measured is None:
            continue
        name = f"gpu_{tag}.{method}_{mode}"
        print_figure(f"{name}_step", measured["step_s"] * 1000, "ms")
        if single := steps.get("full" if method == "fsdp" else method):
            print_figure(f"{name}_speedup", RANKS * single / measured["step_s"], "ratio")
        if method == "fsdp" and not gbit:
            report_memory(machine, method, measured, cards=RANKS)
        if bench is not None and method in profiles:
            predicted = cost_model.predict_step(profiles[method], bench, (0, 1), CommMode(mode)).step_s
            print_figure(f"{name}_predicted", predicted * 1000, "ms")
            print_figure(f"{name}_error", abs(predicted / measured["step_s"] - 1) * 100, "%")


def main() -> None:
    """Measure all, as far as the time allows."""
    folder = Path(sys.argv[1]).resolve()
    machine = Machine(folder, until=time.monotonic() + float(sys.argv[2] if len(sys.argv) > 2 else 330))
    profiles, steps = measure_single(machine)
    measure_pair(machine, profiles, steps, GBIT)
    if torch.cuda.is_available():
        measured = machine.train("lora", "exact", 8, 1, shape="8b")
        if measured:
            report_memory(machine, "lora", measured, shape="8b")
    measure_pair(machine, profiles, steps, None)


if __name__ == "__main__":
    main()
