"""`python3 -m tests.bench.real_gpus.serving FOLDER [SECONDS]`: a divided model on one and two real GPUs of a machine.

Prints `NAME VALUE UNIT` lines: tokens per second of one sequence and of eight, on one GPU, and on two of which each may
use 12 GiB, over NVLink and over links of 10, 2.5 and 1 Gbit/s. It needs root, the commands `ip` and `tc`, torch, transformers,
accelerate and click. The model has random weights. FOLDER is for files; no run is started after SECONDS (330).
`GPU_BENCH_SHAPE=tiny` and CPUs try the program itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.bench.real_gpus.finetuning import Machine, name_link, print_figure, print_note

SLOTS, TOKENS = 8, 96
#: Memory of each of two cards, neither of which has enough for the model of 16 GB.
CAP_MIB = 12 * 1024
SHAPES: dict[str, dict[str, int]] = {
    "small": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 500,
    },
}  # fmt: skip


def write_model(folder: Path, shape: str) -> None:
    """Write a Llama with random weights."""
    import transformers

    config = transformers.LlamaConfig(max_position_embeddings=8192, tie_word_embeddings=False, **SHAPES[shape])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def measure(machine: Machine, model: Path, ranks: int, *, cap_mib: int, gbit: float | None = None) -> Any:
    """Return what some ranks measured; None if that failed."""
    result = machine.folder / "served.json"
    result.unlink(missing_ok=True)
    command = ["-m", "tests.bench.real_gpus.serving_rank", str(model), str(result)]
    if machine.run([*command, str(SLOTS), str(TOKENS), str(cap_mib)], ranks, gbit=gbit) is None:
        return None
    measured = json.loads(result.read_text(encoding="utf-8"))
    print_note(
        f"{ranks} cards, {cap_mib} MiB, {gbit or 'NVLink'}: { {k: v for k, v in measured.items() if k != 'answer'} }"
    )
    return measured


def main() -> None:
    """Measure and print."""
    machine = Machine(Path(sys.argv[1]), until=time.monotonic() + float(sys.argv[2] if len(sys.argv) > 2 else 330))
    model = machine.folder / "model"
    began = time.monotonic()
    if not (model / "config.json").is_file():
        write_model(model, machine.shape)
    torch.cuda.empty_cache() if torch.cuda.is_available() else None
    print_note(f"the model is written in {time.monotonic() - began:.0f} s")
    one = measure(machine, model, 1, cap_mib=0)
    if one is None:
        sys.exit("one card failed")
    print_figure("gpu.serve_one_card_1", one["one_tokens_s"], "tokens/s")
    print_figure("gpu.serve_one_card_8", one["slots_tokens_s"], "tokens/s")
    refused = measure(machine, model, 1, cap_mib=CAP_MIB)
    print_note(f"one card of 12 GiB: {refused}")
    for gbit in (2.5, None, 1.0, 10.0):
        two = measure(machine, model, 2, cap_mib=CAP_MIB, gbit=gbit)
        if two is None:
            continue
        name = name_link(gbit)
        print_figure(f"gpu_{name}.serve_tokens_over_one_1", two["one_tokens_s"] / one["one_tokens_s"], "ratio")
        print_figure(f"gpu_{name}.serve_tokens_over_one_8", two["slots_tokens_s"] / one["slots_tokens_s"], "ratio")
        same = sum(a == b for a, b in zip(one["answer"], two["answer"], strict=True))
        print_figure(f"gpu_{name}.serve_same_tokens", same / len(one["answer"]), "ratio")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
