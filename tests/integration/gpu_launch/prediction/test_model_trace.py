"""Sizes of a model on the meta device, compared with what the same model computes and keeps on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, ViTConfig

import gpu_launch
from gpu_launch.errors import UsageError
from gpu_launch.prediction.model_trace import trace_model

# peft asks transformers by a name that will change.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")]

BATCH, SEQUENCE, RANK = 2, 48, 4


@pytest.fixture(scope="module")
def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip


def measure_kept(model: torch.nn.Module) -> int:
    """Return the bytes that a real forward pass keeps besides the parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(input_ids=tokens, labels=tokens, use_cache=False)
    del output
    return sum(storage.nbytes() for storage in kept.values())


def test_parameters_and_adapters_are_those_of_the_model(config: LlamaConfig) -> None:
    """Counted without memory for the weights."""
    trace = trace_model(config, batch=BATCH, sequence=SEQUENCE, rank=RANK, checkpointing=False)
    model = AutoModelForCausalLM.from_config(config)
    assert trace.parameters == model.num_parameters()
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert (trace.block, trace.outside) == (layer, trace.parameters - 4 * layer)
    assert trace.linear == sum(
        module.weight.numel() for module in model.model.modules() if isinstance(module, torch.nn.Linear)
    )
    adapted = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert trace.adapters == adapted.get_nb_trainable_parameters()[0]
    assert trace.logits == BATCH * SEQUENCE * 512 * 4


@pytest.mark.parametrize("is_adapted", [False, True], ids=["full", "lora"])
def test_activations_are_what_a_step_keeps(config: LlamaConfig, *, is_adapted: bool) -> None:
    """torch's attention on a CPU keeps a little more than FlashAttention: a number for each token and head."""
    trace = trace_model(config, batch=BATCH, sequence=SEQUENCE, rank=RANK, checkpointing=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if is_adapted:
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    expected = measure_kept(model.train())
    assert (trace.lora_activations if is_adapted else trace.full_activations) == pytest.approx(expected, rel=0.05)


def test_checkpointing_keeps_a_block_and_the_sums_between_blocks(config: LlamaConfig) -> None:
    """Much less than everything."""
    whole = trace_model(config, batch=BATCH, sequence=SEQUENCE, rank=RANK, checkpointing=False)
    again = trace_model(config, batch=BATCH, sequence=SEQUENCE, rank=RANK, checkpointing=True)
    assert again.lora_activations < 0.6 * whole.lora_activations
    assert again.full_activations > whole.logits


def test_estimate_of_a_folder_names_it(config: LlamaConfig, tmp_path: Path) -> None:
    """The function that notebooks call, for sizes that are given."""
    config.save_pretrained(tmp_path / "my-model")
    estimate = gpu_launch.estimate_memory(tmp_path / "my-model", sequence=64, cards=["24G", "8G"])
    assert str(estimate).startswith("my-model: 0.000")
    assert estimate.check("full", ranks=2).total_mib < 2048


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("nowhere/at-all", {}, "nowhere/at-all: no model of transformers is there"),
        (None, {"sequence": 65}, "sequence is 65, and the model takes 64 tokens at most"),
        (None, {"batch": 0}, "batch is 0: give a number from 1"),
        (ViTConfig, {}, "vit: not a causal language model that can be traced"),
    ],
)
def test_what_cannot_be_estimated_is_refused(
    config: LlamaConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: object,
    options: dict[str, int],
    message: str,
) -> None:
    """No network is asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    given = config if model is None else model() if callable(model) else model
    with pytest.raises(UsageError, match=message):
        gpu_launch.estimate_memory(given, **{"sequence": 32, "cards": ["8G"], **options})


def test_cards_of_the_cluster_need_a_broker(config: LlamaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one their sizes must be given."""
    monkeypatch.delenv("GPUHUB_BROKER_URL", raising=False)
    with pytest.raises(UsageError, match="give their sizes"):
        gpu_launch.estimate_memory(config, sequence=32)
