"""Measures the cards of a launch and the all-reduces between them: what `%gpu_bench` and `gpu-launch bench` run.

Each rank's card is measured while the others wait, then each pair of ranks, then all ranks together. Rank 0 keeps the
result in the home, or in the file that an argument names, and prints it. With many ranks only neighbours are measured
as pairs. `gpuhub bench` runs it as well.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_launch import environment
from gpu_launch.prediction import figures, report, step_profiler
from gpu_launch.prediction.figures import Bench, Card, Link, Network

#: Bytes of an all-reduce that shows the latency, and of those whose difference shows the bandwidth: DDP's buckets.
_SMALL, _SHORT, _LONG = 4096, 1 << 20, 25 << 20
#: The larger size where the smaller one takes longer than this, seconds.
_MEDIUM, _SLOW_S = 5 << 20, 0.04
_SMALL_ROUNDS, _SHORT_ROUNDS, _LEAST_ROUNDS, _MOST_ROUNDS = 20, 6, 2, 6
#: Time for one size of one pair, seconds.
_PAIR_S = 0.7
#: All pairs are measured up to this number of ranks.
_ALL_PAIRS = 10
_READ_BYTES = 64 << 20


def main() -> None:
    """Measure, and keep and print the result in rank 0."""
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_cuda else torch.device("cpu")
    if has_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    home = environment.read().home
    cards = _measure_cards(device, home)
    links = [_measure_link(pair, device) for pair in list_pairs(ranks)]
    gang = measure_network(dist.group.WORLD, ranks, device) if ranks > 1 else None
    if rank == 0:
        bench = Bench(
            measured_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
            backend=dist.get_backend(),
            cards=tuple(cards),
            links=tuple(links),
            gang=gang,
        )
        figures.write_json(Path(sys.argv[1]) if sys.argv[1:] else figures.get_bench_path(home), bench)
        print(report.format_bench(bench), flush=True)  # noqa: T201 - the output of the launch
    dist.destroy_process_group()


def list_pairs(ranks: int) -> list[tuple[int, int]]:
    """Return the pairs to measure: all, or with many ranks the neighbours in a ring."""
    if ranks <= _ALL_PAIRS:
        return [(first, second) for first in range(ranks) for second in range(first + 1, ranks)]
    return [tuple(sorted((first, (first + 1) % ranks))) for first in range(ranks)]  # type: ignore[misc]


def _measure_cards(device: torch.device, home: Path) -> list[Card]:
    """Return the cards of all ranks; one after another, because ranks may share a CPU or a disk."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own: dict[str, Any] = {}
    for turn in range(ranks):
        if turn == rank:
            read_bytes_s = measure_reading(home / f".gpu_launch-bench-{rank}")
            own = asdict(step_profiler.describe_card(device, read_bytes_s=read_bytes_s))
        dist.barrier()
    gathered: list[dict[str, Any]] = [{}] * ranks
    dist.all_gather_object(gathered, own)
    return [Card(**card) for card in gathered]


def measure_reading(path: Path) -> float:
    """Return the bytes per second in which a new file is read, after this machine has dropped it from its memory."""
    try:
        with path.open("wb", buffering=0) as file:
            file.write(os.urandom(1 << 20) * (_READ_BYTES >> 20))
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
        return _READ_BYTES / (time.perf_counter() - began)
    finally:
        path.unlink(missing_ok=True)


def _measure_link(pair: tuple[int, int], device: torch.device) -> Link:
    group = dist.new_group(list(pair))
    measured: list[Any] = [None]
    if dist.get_rank() in pair:
        measured = [measure_network(group, 2, device)]
    dist.broadcast_object_list(measured, src=pair[0])
    dist.barrier()
    return Link(ranks=pair, network=measured[0])


def measure_network(group: Any, ranks: int, device: torch.device) -> Network:
    """Return the latency and bandwidths of the ring all-reduce in a group, which all its ranks measure at once."""
    turns = 2 * (ranks - 1)
    small_s = _time_allreduce(group, torch.zeros(_SMALL // 4, device=device), _SMALL_ROUNDS)
    bandwidths = [_measure_bandwidth(group, turns / ranks, device, dtype) for dtype in (torch.float32, torch.bfloat16)]
    return Network(latency_s=small_s / turns, bytes_s=bandwidths[0], bf16_bytes_s=bandwidths[1])


def _measure_bandwidth(group: Any, factor: float, device: torch.device, dtype: torch.dtype) -> float:
    """Return the bytes per second that each rank sends, from the difference between two sizes."""
    short = torch.zeros(_SHORT // dtype.itemsize, device=device, dtype=dtype)
    # All ranks of the group must choose the same sizes and numbers.
    short_s = _agree(group, _time_allreduce(group, short, _SHORT_ROUNDS), device)
    size = _LONG if short_s < _SLOW_S else _MEDIUM
    long = torch.zeros(size // dtype.itemsize, device=device, dtype=dtype)
    first_s = _agree(group, _time_allreduce(group, long, 1), device)
    rounds = min(_MOST_ROUNDS, max(_LEAST_ROUNDS, int(_PAIR_S / max(first_s, 1e-9))))
    long_s = _time_allreduce(group, long, rounds)
    bandwidth = factor * (size - _SHORT) / max(long_s - short_s, 1e-9)
    return 1 / _agree(group, 1 / bandwidth, device)


def _time_allreduce(group: Any, tensor: torch.Tensor, rounds: int) -> float:
    """Return the median time of an all-reduce; the first one is not counted where there are several."""
    times: list[float] = []
    for _ in range(rounds + (rounds > 1)):
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[rounds > 1 :])


def _agree(group: Any, value: float, device: torch.device) -> float:
    """Return the largest value of the group's ranks."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return float(tensor)


if __name__ == "__main__":
    main()
