"""Predicted and measured steps of a training on GPUs of this machine, with a slow network between them.

`python -m tests.gpus.prediction [MBIT …]`, as root, with two GPUs, a Python with a CUDA build of torch and torchft, and the
commands ip and tc. Each rank has one GPU and a network namespace of its own, and NCCL is told that they are different
machines. `%gpu_bench` measures, `--predict` profiles the script on one GPU, then the script trains in every mode.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_launch.prediction import bench_main, figures, step_profiler
from gpu_launch.training.comm_modes import LOCAL_PERIOD, PERIODS, VARIABLE, WARM_UP_STEPS, CommMode
from tests.support.launch import gpt_script
from tests.support.launch.launched_ranks import RankOutput, run_launched
from tests.support.launch.step_times import read_step_time, sum_parts

NODES = ("ghgpu-1", "ghgpu-2")
RATES_MBIT = (2500, 10_000)
BATCH, SKIPPED, COUNTED = 48, 5, 15
#: A prediction may be wrong by this factor.
TOLERANCE = 0.1
_KEY = "gpus"


def ip(*words: str, check: bool = True) -> None:
    """Run iproute2's `ip`."""
    subprocess.run(["ip", *words], check=check, capture_output=not check)


@contextmanager
def slow_network(rate_mbit: int) -> Iterator[None]:
    """Two namespaces with the device eth0 of this speed; 10.79.0.1 is the first one's address."""
    try:
        for node in NODES:
            ip("netns", "del", node, check=False)
            ip("netns", "add", node)
        ip("link", "add", "eth0", "netns", NODES[0], "type", "veth", "peer", "name", "eth0", "netns", NODES[1])
        for number, node in enumerate(NODES, start=1):
            ip("-n", node, "addr", "add", f"10.79.0.{number}/24", "dev", "eth0")
            ip("-n", node, "link", "set", "lo", "up")
            ip("-n", node, "link", "set", "eth0", "up")
            shape = f"qdisc add dev eth0 root tbf rate {rate_mbit}mbit burst 512kb latency 50ms"
            subprocess.run(["tc", "-n", node, *shape.split()], check=True)
        yield
    finally:
        for node in NODES:
            ip("netns", "del", node, check=False)


def run(command: list[str], ranks: int, environ: dict[str, str]) -> list[RankOutput]:
    """Run a command in the first nodes, and check that all ranks succeed."""
    own = [
        (f"CUDA_VISIBLE_DEVICES={number}", f"NCCL_HOSTID={node}", f"GPUHUB_NODE={node}")
        for number, node in enumerate(NODES)
    ]
    outputs = run_launched(
        command,
        ranks,
        {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"} | environ,
        address="10.79.0.1",
        interface="eth0",
        prefixes=[
            ("nsenter", f"--net=/run/netns/{node}", "env", *words) for node, words in zip(NODES, own, strict=True)
        ],
    )
    assert [rank.code for rank in outputs] == [0] * ranks, "\n".join(rank.stdout + rank.stderr for rank in outputs)
    return outputs


def time_step(home: Path, ranks: int, mode: CommMode) -> float:
    """Return the seconds of a step."""
    skipped = WARM_UP_STEPS + LOCAL_PERIOD if mode in (CommMode.POWERSGD, CommMode.LOCAL) else SKIPPED
    counted = 2 * LOCAL_PERIOD if mode is CommMode.LOCAL else PERIODS.get(mode, COUNTED)
    file = home / "steps.json"
    run(
        [gpt_script.__file__, str(file), str(skipped + counted), str(BATCH)], ranks, {"HOME": str(home), VARIABLE: mode}
    )
    return read_step_time(file, mode, skipped)


def compare(rate_mbit: int, home: Path) -> None:
    """Print prediction and measurement of every mode, and check the prediction."""
    with slow_network(rate_mbit):
        print(f"{rate_mbit} Mbit/s\n{run(['-m', bench_main.__name__], 2, {'HOME': str(home)})[0].stdout}")
        script = [gpt_script.__file__, str(home / "steps.json"), "1000", str(BATCH)]
        print(run(script, 1, {"HOME": str(home), step_profiler.VARIABLE: _KEY})[0].stdout)
        kept = json.loads(figures.get_prediction_path(home, _KEY).read_text())
        for step in kept["steps"]:
            ranks, mode = len(step["cards"]), CommMode(step["mode"])
            predicted_s, measured_s = sum_parts(step), time_step(home, ranks, mode)
            error = abs(predicted_s / measured_s - 1)
            print(
                f"{ranks} GPUs, {mode}: predicted {predicted_s * 1000:.1f} ms, measured {measured_s * 1000:.1f} ms, "
                f"error {error:.1%}",
                flush=True,
            )
            assert error < TOLERANCE, "this prediction is wrong by more"


def main() -> None:
    """Compare with networks of each speed."""
    for rate_mbit in map(int, sys.argv[1:] or RATES_MBIT):
        with tempfile.TemporaryDirectory() as home:
            compare(rate_mbit, Path(home))


if __name__ == "__main__":
    main()
