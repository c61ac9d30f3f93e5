"""Random suspensions of programs that compute on a real GPU, with every result compared: needs root, torch and one GPU.

`python -m tests.gpus.suspensions MINUTES [SEED [GPU]]`: two programs take turns on the GPU with this index, 0 if none is
named; series on several GPUs can run at once. Each program is suspended at random moments by the script that nodes run
(`gpuhub.nodes.gpu_suspension`), and now and then a third program fills the empty GPU. At the end each program runs once
more without interruption; a result that differs anywhere is an error.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpuhub.nodes import gpu_suspension
from gpuhub.nodes.gpu_suspension import CheckpointDriver, Gpu, Outcome

#: Longest times in which a program computes and in which it is suspended, seconds.
WORK_S, AWAY_S = 4.0, 3.0
#: For results that are the same each time.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
#: Every how many steps a program writes a checksum of its state.
CHECKED = 20
HOST_MIB = 512 * 1024

#: Trains for ever, or for a number of steps; writes a checksum of all parameters every `CHECKED` steps.
PROGRAM = """
import sys, zlib, torch
kind, ballast_gib, steps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(len(kind)); torch.use_deterministic_algorithms(True)
ballast = torch.randint(0, 255, (int(ballast_gib * 2**30),), dtype=torch.uint8, device="cuda")
ballast = ballast.view(torch.int64)
expected = ballast.sum()
side = torch.cuda.Stream()
if kind == "layers":
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))).cuda()
    data = torch.randn(256, 1024, device="cuda")
else:
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda()
    data = torch.randn(512, 512, device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
def step():
    optimizer.zero_grad(set_to_none=False)
    ((model(data) - data) ** 2).mean().backward()
    optimizer.step()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
if kind == "graph":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
pinned = torch.empty_like(torch.cat([p.detach().flatten() for p in model.parameters()]), device="cpu").pin_memory()
number = 0
while number != steps:
    number += 1
    graph.replay() if kind == "graph" else step()
    scratch = torch.randn(64, 1024, 1024, device="cuda").sum()   # the allocator's pools change
    if number % CHECKED == 0:
        pinned.copy_(torch.cat([p.detach().flatten() for p in model.parameters()]), non_blocking=True)
        torch.cuda.synchronize()
        assert ballast.sum() == expected, "the ballast has changed"
        print(number, zlib.crc32(pinned.numpy().tobytes()), flush=True)
"""
#: Fills most of the GPU, and reads it back.
VISITOR = """
import torch
free, _ = torch.cuda.mem_get_info()
block = torch.full((int(free * 0.9),), 7, dtype=torch.uint8, device="cuda")
assert int(block.min()) == int(block.max()) == 7
"""


@dataclass(slots=True)
class Program:
    """A program that runs in a mount namespace of its own, as in a container."""

    kind: str
    ballast_gib: float
    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def log(self) -> Path:
        return self.folder / f"{self.kind}.txt"

    def start(self) -> None:
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                ["unshare", "--mount", *self.build_command(-1)],
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def build_command(self, steps: int) -> list[str]:
        code = PROGRAM.replace("CHECKED", str(CHECKED))
        return [sys.executable, "-c", code, self.kind, str(self.ballast_gib), str(steps)]

    def read_checksums(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def check_runs(self) -> None:
        assert self.process.poll() is None, f"{self.kind} has ended: {self.log.read_text()[-2000:]}"


class Node:
    """What the node's script does, with one process in place of a container's; programs see this GPU alone."""

    def __init__(self, index: int) -> None:
        uuid = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], check=True, capture_output=True, text=True
        ).stdout.split()[index]
        self.gpu, self.driver = Gpu(uuid), CheckpointDriver()
        os.environ["CUDA_VISIBLE_DEVICES"] = uuid
        self.figures: dict[str, list[float]] = {"out_s": [], "back_s": [], "moved_mib": []}

    def suspend(self, program: Program) -> None:
        self._choose(program)
        began = time.monotonic()
        moved_mib = gpu_suspension.suspend("", self.gpu, HOST_MIB, self.driver)
        self.figures["out_s"].append(time.monotonic() - began)
        self.figures["moved_mib"].append(moved_mib)
        assert self.gpu.explain_use() is None

    def resume(self, program: Program) -> None:
        self._choose(program)
        began = time.monotonic()
        gpu_suspension.resume("", self.gpu, self.driver)
        self.figures["back_s"].append(time.monotonic() - began)

    @staticmethod
    def _choose(program: Program) -> None:
        pid = program.process.pid
        gpu_suspension.list_container_pids = lambda _container: [pid]


def run(minutes: float, seed: int, gpu: int) -> dict[str, Any]:
    """Suspend and resume for a time on the GPU with this index; return the figures.

    Raises:
        AssertionError: A result differs, or a program has ended.
        Outcome: A step was refused, or has failed.
    """
    chance, node, visits = random.Random(seed), Node(gpu), 0
    with TemporaryDirectory() as name:
        programs = [Program("layers", 2.0, Path(name)), Program("graph", 6.0, Path(name))]
        try:
            for program in programs:
                program.start()
                while len(program.read_checksums()) < 1:
                    program.check_runs()
                    time.sleep(0.2)
                node.suspend(program)
            end = time.monotonic() + minutes * 60
            while time.monotonic() < end:
                program = chance.choice(programs)
                node.resume(program)
                time.sleep(chance.uniform(0, WORK_S))
                program.check_runs()
                node.suspend(program)
                if chance.random() < 0.2:
                    subprocess.run([sys.executable, "-c", VISITOR], check=True)
                    visits += 1
                else:
                    time.sleep(chance.uniform(0, AWAY_S))
            return {
                "suspensions": len(node.figures["out_s"]),
                "programs on the empty GPU": visits,
                "compared": {program.kind: compare(node, program) for program in programs},
                **{name: [round(min(values), 2), round(max(values), 2)] for name, values in node.figures.items()},
            }
        finally:
            for program in programs:
                program.process.kill()
                program.process.wait()


def compare(node: Node, program: Program) -> int:
    """Compare a program's checksums with those of an uninterrupted run; return their number."""
    node.resume(program)
    count = len(program.read_checksums()) + 2
    while len(program.read_checksums()) < count:
        program.check_runs()
        time.sleep(0.1)
    program.process.kill()
    program.process.wait()
    seen = program.read_checksums()[:count]
    whole = subprocess.run(
        program.build_command(count * CHECKED), check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert seen == whole, (
        f"{program.kind}: {next(pair for pair in zip(seen, whole, strict=True) if pair[0] != pair[1])}"
    )
    return count


def main(arguments: Sequence[str]) -> None:
    """Run, or do what the script starts this program for."""
    if arguments[0] in (gpu_suspension.HIDE, gpu_suspension.SHOW):
        gpu_suspension.change_mount(*arguments)
        return
    minutes, seed = float(arguments[0]), int(arguments[1]) if len(arguments) > 1 else time.time_ns()
    gpu = int(arguments[2]) if len(arguments) > 2 else 0
    print(f"seed {seed}, GPU {gpu}", flush=True)
    try:
        print(json.dumps(run(minutes, seed, gpu), indent=1))
    except Outcome as outcome:
        sys.exit(f"{outcome.outcome}: {outcome.text}")


if __name__ == "__main__":
    main(sys.argv[1:])
