"""The sizes of a language model and of what a training step keeps of it, without its weights and without a GPU.

transformers builds the model on torch's meta device, where tensors have a shape and no memory. What autograd keeps for
the backward pass is counted in a forward pass there, for any architecture that transformers has.
"""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_launch.errors import UsageError
from gpu_launch.prediction.memory_estimate import ModelTrace

if TYPE_CHECKING:
    from collections.abc import Iterator

_ATTENTION = "gpu_launch_trace"
_CHECKPOINTING = "activation_checkpointing_enable"


def trace_model(model: str | Any, *, batch: int, sequence: int, rank: int, checkpointing: bool) -> ModelTrace:
    """Return the sizes of a causal language model in a step of training.

    Args:
        model: A folder, a name in the Hugging Face cache, or a configuration of transformers.
        batch: Sequences that a rank computes at once.
        sequence: Tokens of each.
        rank: Rank of LoRA's matrices, which are added to all linear layers except the last.
        checkpointing: Whether activations are computed again in the backward pass.

    Raises:
        UsageError: transformers or peft is not installed, or the model is not there or not a causal language model.
    """
    try:
        import peft
        import transformers
    except ImportError as error:
        raise UsageError(
            f"memory is estimated with transformers and peft, and {error.name} is not installed here: use the image "
            "gpuhub/llm, or pip install it"
        ) from None
    import torch

    config = _read_config(transformers, model)
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and sequence > longest:
        raise UsageError(f"sequence is {sequence}, and the model takes {longest} tokens at most")
    with _quiet(transformers), _light_attention(torch, transformers):
        plain = _build(torch, transformers, config)
        sizes = _count(torch, plain)
        full, _ = _trace(torch, plain, batch, sequence, checkpointing=checkpointing)
        adapted = peft.get_peft_model(
            _build(torch, transformers, config),
            peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        lora, logits = _trace(torch, adapted, batch, sequence, checkpointing=checkpointing)
        adapters = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    return ModelTrace(
        name=_name(model, config),
        batch=batch,
        sequence=sequence,
        checkpointing=checkpointing,
        adapters=adapters,
        full_activations=full,
        lora_activations=lora,
        logits=logits,
        **sizes,
    )


def _read_config(transformers: Any, model: str | Any) -> Any:
    if not isinstance(model, str | Path):
        # transformers notes the attention in it.
        return copy.deepcopy(model)
    try:
        return transformers.AutoConfig.from_pretrained(str(model))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"{model}: no model of transformers is there ({reason}). Give a folder with its config.json, or a name "
            "that is in the Hugging Face cache or can be downloaded"
        ) from None


def _name(model: str | Any, config: Any) -> str:
    if isinstance(model, str | Path):
        return Path(model).name
    return str(getattr(config, "name_or_path", "") or config.model_type)


def _build(torch: Any, transformers: Any, config: Any) -> Any:
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=_ATTENTION
            )
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{config.model_type}: not a causal language model that can be traced: {reason}") from None


def _count(torch: Any, model: Any) -> dict[str, int]:
    """Return the numbers of parameters: of all, of linear layers without the last, and of the largest block."""
    last = model.get_output_embeddings()
    linear = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not last
    )
    blocks = [
        sum(parameter.numel() for parameter in block.parameters())
        for layers in model.modules()
        if isinstance(layers, torch.nn.ModuleList)
        for block in layers
    ]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    largest = max(blocks, default=parameters)
    outside = parameters - len(list(_find_layers(torch, model))) * largest if blocks else 0
    return {"parameters": parameters, "linear": linear, "block": largest, "outside": max(0, outside)}


def _find_layers(torch: Any, model: Any) -> Any:
    """Return the list of the model's blocks: the one with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()), default=[])


def _trace(torch: Any, model: Any, batch: int, sequence: int, *, checkpointing: bool) -> tuple[int, int]:
    """Return the bytes that a forward pass keeps for the backward pass, and those of the logits in float32."""
    whole = _count_kept(torch, model, batch, sequence)
    vocabulary = int(model.get_output_embeddings().out_features)
    logits = batch * sequence * vocabulary * 4
    if not checkpointing:
        return whole, logits
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = max(1, len(list(_find_layers(torch, base))))
    # Before version 5.20 of transformers it has another name.
    getattr(base, _CHECKPOINTING if hasattr(base, _CHECKPOINTING) else "gradient_checkpointing_enable")()
    if base is not model:
        # As transformers needs it for frozen weights: the inputs of the first block must have a gradient.
        base.enable_input_require_grads()
    kept = _count_kept(torch, model, batch, sequence)
    # One block at a time is computed again.
    return kept + math.ceil(max(0, whole - kept) / layers), logits


def _count_kept(torch: Any, model: Any, batch: int, sequence: int) -> int:
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    model.train()
    tokens = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(input_ids=tokens, labels=tokens, use_cache=False)
    del output
    return sum(storage.nbytes() for storage in kept.values())


@contextmanager
def _light_attention(torch: Any, transformers: Any) -> Iterator[None]:
    """Let transformers use an attention that keeps what FlashAttention does: on the meta device, torch's keeps more."""

    class Attention(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, query: Any, key: Any, value: Any) -> Any:
            output = torch.empty_like(query)
            context.save_for_backward(query, key, value, output)
            return output

        @staticmethod
        def backward(context: Any, _gradient: Any) -> Any:
            query, key, value, _ = context.saved_tensors
            return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    def attend(_module: Any, query: Any, key: Any, value: Any, _mask: Any, **_options: Any) -> tuple[Any, None]:
        return Attention.apply(query, key, value).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register(_ATTENTION, attend)
    try:
        yield
    finally:
        del transformers.AttentionInterface._global_mapping[_ATTENTION]


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep warnings about a model that is never computed from the user."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
