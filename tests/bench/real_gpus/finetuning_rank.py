"""One rank of `finetuning`: trains a language model with random weights, and writes what a step took into a file.

`finetuning_rank.py RESULT METHOD MODE SHAPE STEPS`: METHOD is full, lora or fsdp, MODE one of `--comm`. Also a profile
for a prediction: MODE `profile`.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpu_launch.training import ddp_communication
from gpu_launch.training.comm_modes import VARIABLE

#: Steps at the begin with exact gradients, in place of a hundred, so that the measurement is short.
WARM_UP_STEPS = 4


@dataclass(frozen=True)
class Shape:
    """A Llama of random weights and its batch."""

    hidden: int
    layers: int
    inner: int
    heads: int
    key_heads: int
    vocabulary: int
    batch: int
    sequence: int
    checkpointing: bool
    #: Batches that a step adds up before gradients are exchanged.
    accumulated: int = 1


SHAPES = {
    "tiny": Shape(64, 2, 128, 4, 2, 256, 2, 32, False, 2),
    "small": Shape(1024, 12, 2816, 16, 8, 32000, 16, 1024, False),
    "8b": Shape(4096, 32, 14336, 32, 8, 128256, 1, 2048, True, 16),
}


def build_config(shape: Shape) -> Any:
    """Return transformers' configuration."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.layers < 32,
        max_position_embeddings=4096,
    )


def main() -> None:
    """Train, and write the result in rank 0."""
    result, method, mode, named, steps = sys.argv[1:]
    shape = SHAPES[named]
    ddp_communication.WARM_UP_STEPS = WARM_UP_STEPS
    if mode == "profile":
        _install_profiler(Path(result))
    else:
        os.environ[VARIABLE] = mode
        if method != "fsdp" and int(os.environ["WORLD_SIZE"]) > 1:
            ddp_communication.install()
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if has_cuda else "cpu")
    dist.init_process_group("nccl" if has_cuda else "gloo")
    torch.manual_seed(0)
    model = build_model(shape, method, device)
    if method != "fsdp" and dist.get_world_size() > 1:
        # All ranks have drawn the same weights.
        model = DistributedDataParallel(model, init_sync=False)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    times, losses = [], []
    for _ in range(int(steps)):
        began = time.perf_counter()
        optimizer.zero_grad()
        for left in reversed(range(shape.accumulated)):
            tokens = torch.randint(shape.vocabulary, (shape.batch, shape.sequence), generator=generator).to(device)
            with model.no_sync() if left and isinstance(model, DistributedDataParallel) else nullcontext():
                with torch.autocast(device.type, torch.bfloat16, enabled=method == "full"):
                    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                (loss / shape.accumulated).backward()
        optimizer.step()
        if has_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        losses.append(loss.item())
    # With `local` eight steps have one average, so all that are counted are a multiple of eight.
    counted = times[-8:] if mode == "local" else times[(1 if shape.accumulated > 1 else WARM_UP_STEPS + 1) :]
    if dist.get_rank() == 0:
        figures = {
            "step_s": statistics.fmean(counted) if mode == "local" else statistics.median(counted),
            "steps": len(counted),
            "loss": losses[-1],
            "allocated_mib": torch.cuda.max_memory_allocated() >> 20 if has_cuda else 0,
            "reserved_mib": torch.cuda.max_memory_reserved() >> 20 if has_cuda else 0,
            "used_mib": _read_used() if has_cuda else 0,
            "trained_mb": sum(p.numel() for p in model.parameters() if p.requires_grad) * 4 / 1e6,
        }
        Path(result).write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _read_used() -> int:
    free, whole = torch.cuda.mem_get_info()
    return (whole - free) >> 20


def build_model(shape: Shape, method: str, device: torch.device) -> Any:
    """Return a model with random weights, whose parameters METHOD trains; `fsdp` divides it among the ranks."""
    from transformers import AutoModelForCausalLM

    config = build_config(shape)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if method == "lora" else torch.float32, attn_implementation="sdpa"
        )
    if shape.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        if shape.checkpointing:
            model.enable_input_require_grads()
    model.train()
    if method == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)
    return model


def _install_profiler(result: Path) -> None:
    """Profile as `--predict` does, and write the profile instead of a prediction."""
    from gpu_launch.prediction.step_profiler import StepProfiler

    StepProfiler(lambda profile: result.write_bytes(pickle.dumps(profile)) and None).install(torch)


if __name__ == "__main__":
    main()
