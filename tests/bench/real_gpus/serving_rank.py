"""One rank of the measurement of serving: `serving_rank MODEL RESULT SLOTS TOKENS CAP_MIB`.

Each rank may use CAP_MIB of its card, and torch enforces it; 0 for all of it. Rank 0 writes what it measured.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_launch.errors import UsageError
from gpu_launch.serving import model_files, partition
from gpu_launch.serving.engine import Engine, Finish, Sequence
from gpu_launch.serving.partition import ServingNeed
from gpu_launch.serving.pipeline import HEARTBEAT_S, Pipeline
from gpu_launch.serving.stage import Stage
from gpu_launch.serving.steps import Sampling

PROMPT, CONTEXT = 256, 1024
#: A card that is large enough for the whole model.
_WHOLE_MIB = 78 * 1024
_MIB = 1 << 20


def main() -> None:
    """Load this rank's stage, and measure in rank 0."""
    folder, result, slots, tokens, cap = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:6])
    # Each rank sees one card.
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if cap and device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory // _MIB
        # The bound is for torch's own memory: CUDA's context comes on top.
        torch.cuda.set_per_process_memory_fraction((cap - 512) / whole, device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, need = model_files.read_folder(folder), ServingNeed(slots=slots, context=CONTEXT)
    memory = [cap or _WHOLE_MIB] * ranks
    try:
        stages = partition.choose_layers(model, memory, need)
    except UsageError as error:
        if rank == 0:
            result.write_text(json.dumps({"refused": str(error)}), encoding="utf-8")
        return
    began = time.monotonic()
    stage = Stage(folder, model, stages[rank], need, device)
    dist.all_reduce(torch.zeros(1))
    loaded_s = time.monotonic() - began
    pipeline = Pipeline(stage, rank=rank, ranks=ranks, slots=slots, device=device)
    values: dict[str, Any] = {"loaded_s": loaded_s, "layers": [len(layers) for layers in stages]}
    if rank == 0:
        values |= _measure(pipeline, slots, tokens, model.vocabulary)
    else:
        pipeline.follow()
    used = torch.cuda.max_memory_reserved() // _MIB if device.type == "cuda" else 0
    figures: list[Any] = [None] * ranks
    dist.all_gather_object(
        figures, {"reserved_mib": used, "needed_mib": partition.count_stage(model, stages[rank], need)}
    )
    if rank == 0:
        result.write_text(json.dumps(values | {"cards": figures}), encoding="utf-8")
    dist.destroy_process_group()


def _measure(pipeline: Pipeline, slots: int, tokens: int, vocabulary: int) -> dict[str, Any]:
    """Return the tokens per second of one sequence and of all slots, and the answer to the first prompt."""
    engine = Engine(
        pipeline,
        slots=slots,
        context=CONTEXT,
        chunk=partition.CHUNK,
        most_waiting=slots,
        idle_s=None,
        beat_s=HEARTBEAT_S,
    )
    thread = threading.Thread(target=engine.run)
    thread.start()
    _generate(engine, 1, 8, vocabulary)
    one, answer = _generate(engine, 1, tokens, vocabulary)
    all_slots, _ = _generate(engine, slots, tokens, vocabulary)
    engine.stop()
    thread.join()
    return {"one_tokens_s": one, "slots_tokens_s": all_slots, "answer": answer}


def _generate(engine: Engine, number: int, tokens: int, vocabulary: int) -> tuple[float, list[int]]:
    """Return the tokens per second after the first token of each of some sequences, and the tokens of the first one."""
    draw = random.Random(1)
    left, ended, firsts = threading.Semaphore(0), [], []
    sequences = []
    for _ in range(number):
        times: list[float] = []

        def emit(item: Any, times: list[float] = times) -> None:
            if isinstance(item, int):
                times.append(time.monotonic())
            else:
                ended.append(item)
                left.release()

        firsts.append(times)
        prompt = tuple(draw.randrange(vocabulary) for _ in range(PROMPT))
        sequence = Sequence(prompt=prompt, max_tokens=tokens, sampling=Sampling(), ends=frozenset(), emit=emit)
        sequences.append(sequence)
        engine.submit(sequence)
    for _ in range(number):
        left.acquire()
    if any(item is not Finish.LENGTH for item in ended):
        raise RuntimeError(f"an answer ended with {ended}")
    # All have their prompt when the last one has its first token.
    begin = max(times[0] for times in firsts)
    counted = [time for times in firsts for time in times if time > begin]
    return len(counted) / (max(counted) - begin), sequences[0].tokens


if __name__ == "__main__":
    sys.exit(main())
