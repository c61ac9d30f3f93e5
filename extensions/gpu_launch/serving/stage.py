"""One stage of a divided model: its own layers with their weights, their keys and values, and a step through them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_launch.errors import UsageError
from gpu_launch.serving import model_files
from gpu_launch.serving.model_files import ModelDescription
from gpu_launch.serving.partition import ServingNeed
from gpu_launch.serving.steps import Sampling, Step

#: Lists of a configuration with an entry for each layer.
_LISTS = ("layer_types", "no_rope_layers")
#: Without cuDNN's attention, which plans for each number of keys, and so for each token: 40 to 80 ms on an H100.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class SlotCache:
    """Keys and values of a stage's layers, for a fixed number of sequences of a bounded length.

    transformers' attention calls `update` for each layer, as for a cache of its own.
    """

    is_compileable = False

    def __init__(self, model: ModelDescription, layers: int, need: ServingNeed, device: torch.device) -> None:
        shape = (need.slots, model.kv_heads, need.context, model.head_size)
        dtype = getattr(torch, model.dtype)
        self._layers = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(layers)
        ]
        self._device = device
        self._first, self._end, self._place = 0, 0, 0
        #: Places of the new tokens, [rows, width], and their rows; None where all are in one row.
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin(self, step: Step, places: torch.Tensor) -> None:
        """Place the next `update` of each layer: rows of the step, at these places."""
        self._first, self._place = step.first_slot, step.rows[0].start
        self._end = max(row.start for row in step.rows) + step.width
        # Once for all layers: small operations on a GPU take as long as large ones.
        rows = torch.arange(len(step.rows), device=self._device)[:, None]
        self._places = (rows, places) if len(step.rows) > 1 else None

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Keep a layer's new keys and values, [rows, heads, width, size]; return all of these rows."""
        kept = []
        for held, new in zip(self._layers[layer_idx], (keys, values), strict=True):
            slots = held[self._first : self._first + new.shape[0]]
            if self._places is None:
                slots[:, :, self._place : self._end] = new
            else:
                slots.transpose(1, 2)[self._places] = new.transpose(1, 2)
            kept.append(slots[:, :, : self._end])
        return kept[0], kept[1]

    def get_seq_length(self, _layer: int = 0) -> int:
        """Return the number of tokens that some row has."""
        return self._end


class Stage:
    """Some layers of a model on one device."""

    def __init__(
        self,
        folder: Path,
        description: ModelDescription,
        layers: range,
        need: ServingNeed,
        device: torch.device,
    ) -> None:
        """Load the weights of these layers alone.

        Raises:
            UsageError: weights are missing or have another shape.
        """
        self._description, self._device = description, device
        self.is_first, self.is_last = layers.start == 0, layers.stop == description.layers
        self._model = _load(folder, description, layers, device)
        self._config = self._model.config
        self._cache = SlotCache(description, len(layers), need, device)

    @property
    def hidden_shape(self) -> tuple[int, torch.dtype]:
        """Return the size of a token's hidden state, and its type."""
        return self._description.hidden, getattr(torch, self._description.dtype)

    def compute(self, step: Step, hidden: torch.Tensor | None) -> torch.Tensor | list[int] | None:
        """Return the hidden states of a step; from the last stage the next tokens, if they are needed.

        Args:
            step: The step; the first stage takes its tokens.
            hidden: What the stage before computed; None in the first one.
        """
        with torch.inference_mode(), sdpa_kernel(_ATTENTION):
            return self._compute(step, hidden)

    def _compute(self, step: Step, hidden: torch.Tensor | None) -> torch.Tensor | list[int] | None:
        starts = torch.tensor([row.start for row in step.rows], device=self._device)
        places = starts[:, None] + torch.arange(step.width, device=self._device)
        self._cache.begin(step, places)
        inputs: dict[str, Any] = {"inputs_embeds": hidden}
        if hidden is None:
            inputs = {"input_ids": torch.tensor([row.tokens for row in step.rows], device=self._device)}
        inputs |= {
            "attention_mask": self._build_mask(places),
            "position_ids": places,
            "past_key_values": self._cache,
            "use_cache": True,
        }
        if not self.is_last:
            states: torch.Tensor = self._model.model(**inputs).last_hidden_state
            return states
        if not step.samples:
            self._model.model(**inputs)
            return None
        logits = self._model(**inputs, logits_to_keep=1).logits[:, -1].float()
        return (
            [choose_token(logits[number], row.sampling, row.start + step.width) for number, row in enumerate(step.rows)]
            if any(row.sampling.temperature for row in step.rows)
            else logits.argmax(-1).tolist()
        )

    def _build_mask(self, places: torch.Tensor) -> Any:
        """Return which keys each query sees, [rows, 1, queries, keys]; one mask of each kind if layers differ."""
        keys = torch.arange(self._cache.get_seq_length(), device=self._device)
        seen = keys[None, None, None, :] <= places[:, None, :, None]
        window = getattr(self._config, "sliding_window", None)
        near = seen if window is None else seen & (keys[None, None, None, :] > places[:, None, :, None] - window)
        if getattr(self._config, "layer_types", None):
            return {"full_attention": seen, "sliding_attention": near}
        return near


def choose_token(logits: torch.Tensor, sampling: Sampling, place: int) -> int:
    """Return the next token: the most probable one, or drawn; the same seed and place draw the same.

    Args:
        logits: Of each token, in float32.
        sampling: How it is chosen.
        place: The number of tokens before it.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities, tokens = torch.softmax(logits / sampling.temperature, dim=-1).sort(descending=True)
    sums = probabilities.cumsum(0)
    # The fewest tokens that have together `top_p`.
    number = int((sums - probabilities < sampling.top_p).sum())
    drawn = random.Random(f"{sampling.seed}:{place}").random() * float(sums[number - 1])  # noqa: S311 - no secret
    return int(tokens[min(int((sums[:number] <= drawn).sum()), number - 1)])


def _load(folder: Path, description: ModelDescription, layers: range, device: torch.device) -> Any:
    """Return transformers' model with these layers alone."""
    import transformers
    from accelerate import init_empty_weights

    config = transformers.AutoConfig.from_pretrained(str(folder))
    config.num_hidden_layers = len(layers)
    for name in _LISTS:
        if entries := getattr(config, name, None):
            setattr(config, name, list(entries)[layers.start : layers.stop])
    with torch.device(device), init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, description.dtype), attn_implementation="sdpa"
        )
    is_first, is_last = layers.start == 0, layers.stop == description.layers
    if not is_first:
        model.model.embed_tokens = torch.nn.Identity()
    if not is_last:
        model.model.norm, model.lm_head = torch.nn.Identity(), torch.nn.Identity()
    _fill(model, folder, description, layers, device)
    return model.eval()


def _fill(model: Any, folder: Path, description: ModelDescription, layers: range, device: torch.device) -> None:
    """Give each parameter its weights from the files."""
    wanted: dict[str, str] = {}
    for name, _parameter in model.named_parameters(remove_duplicate=False):
        source = name
        if name.startswith("model.layers."):
            number, _, rest = name.removeprefix("model.layers.").partition(".")
            source = f"model.layers.{int(number) + layers.start}.{rest}"
        elif name == _HEAD and description.is_tied:
            source = _EMBEDDING
        wanted[name] = source
    tensors: dict[str, torch.Tensor] = {}
    dtype = getattr(torch, description.dtype)
    for file in model_files.list_weight_files(folder):
        with safe_open(str(folder / file), framework="pt", device=str(device)) as weights:
            for source in set(wanted.values()).intersection(weights.keys()):
                tensors[source] = weights.get_tensor(source).to(dtype)
    if missing := sorted(set(wanted.values()) - tensors.keys()):
        raise UsageError(f"{folder}: the weights {missing[0]} are missing: the model's copy is incomplete.")
    parameters = {source: torch.nn.Parameter(tensor, requires_grad=False) for source, tensor in tensors.items()}
    for name, source in wanted.items():
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        if getattr(module, last).shape != parameters[source].shape:
            raise UsageError(
                f"{folder}: the weights {source} have the shape {tuple(parameters[source].shape)}, and "
                f"{model_files.CONFIG} means {tuple(getattr(module, last).shape)}."
            )
        setattr(module, last, parameters[source])
