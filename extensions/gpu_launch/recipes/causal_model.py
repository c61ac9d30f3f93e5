"""Causal language models of transformers for training and evaluation, on this process's device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_launch.errors import UsageError
from gpu_launch.serving import model_names

_CPU = "cpu"


@dataclass(frozen=True)
class Device:
    """The device of this process, and its place among all ranks."""

    torch: torch.device
    rank: int
    world: int

    @classmethod
    def find(cls) -> Device:
        """Return this process's device."""
        device = torch.device("cuda" if torch.cuda.is_available() else _CPU)
        if dist.is_initialized():
            return cls(device, dist.get_rank(), dist.get_world_size())
        return cls(device, 0, 1)

    @property
    def is_gpu(self) -> bool:
        return bool(self.torch.type != _CPU)

    def sum(self, value: float) -> float:
        """Return the sum of the values of all ranks, which must all call it."""
        if self.world == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64, device=self.torch)
        dist.all_reduce(total)
        return float(total.item())


@contextmanager
def joined_group() -> Iterator[None]:
    """Join the process group of a launch's ranks meanwhile; a process that is no rank has none."""
    if "RANK" not in os.environ:
        yield
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def find_model(name: str) -> Path:
    """Return a model's folder, by its path or name.

    Raises:
        UsageError: There is none.
    """
    return model_names.find_folder(name, cwd=Path.cwd(), environ=os.environ, home=Path.home())


def build_model(folder: Path, device: Device, *, method: str = "lora", adapter_rank: int = 16) -> Any:
    """Return a model for training: with new adapters around frozen weights, or with `full` as it is.

    Raises:
        UsageError: The folder has no causal language model.
    """
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model = load_model(folder, device, method=method)
    if device.is_gpu:  # computes activations again in the backward pass instead of keeping them
        model.activation_checkpointing_enable({"use_reentrant": False})
    if method == "full":
        return model
    if method == "qlora":
        prepare: Any = prepare_model_for_kbit_training
        model = prepare(model, use_gradient_checkpointing=device.is_gpu)
    adapter = LoraConfig(
        r=adapter_rank, lora_alpha=2 * adapter_rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, adapter)
    model.enable_input_require_grads()
    return model


def load_model(folder: Path, device: Device, *, method: str = "lora") -> Any:
    """Return a model of transformers: in 4 bits for `qlora`, in float32 for `full`, else in bfloat16 on a GPU.

    Raises:
        UsageError: The folder has no causal language model.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    # peft asks by a name that transformers will change.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")
    quantisation = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if device.is_gpu else torch.float32,
    )
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16 if device.is_gpu and method != "full" else torch.float32,
            quantization_config=quantisation if method == "qlora" else None,
            device_map={"": device.torch},
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: the model cannot be loaded: {error}") from None


def compute_loss(net: Any, batch: Any, device: Device) -> Any:
    """Return the mean loss of a batch of token ids of shape (sequences, tokens)."""
    with torch.autocast(device.torch.type, torch.bfloat16, enabled=device.is_gpu):
        return net(input_ids=batch, labels=batch, use_cache=False).loss
