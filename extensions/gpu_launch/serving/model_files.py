"""A model's folder as it must be to be served: its configuration, and the sizes of its weights. No torch.

Sizes come from the headers of the safetensors files, of which no weight is read; without the files, from the index.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_launch.errors import UsageError

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
#: Architectures whose layers can be divided: those that the tests compare with transformers' own result.
ARCHITECTURES = (
    "cohere", "gemma", "gemma3_text", "glm4", "llama", "mistral", "olmo", "olmo2", "phi3", "qwen2", "qwen3", "smollm3",
    "stablelm", "starcoder2",
)  # fmt: skip
#: A larger configuration, index or header is none.
MAX_CONFIG, MAX_INDEX, _MAX_HEADER = 1 << 20, 64 << 20, 64 << 20
#: Bytes of an element, by the names that configurations and safetensors files use.
DTYPES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Kinds of rotary embeddings whose result depends on how long a sequence is, and so on its neighbours in a batch.
_CHANGING_ROPES = frozenset({"dynamic", "longrope"})
#: Architectures whose last layer has the embedding's weights, where the configuration does not say it.
_TIED = frozenset({"cohere", "gemma", "gemma3_text", "smollm3", "starcoder2"})
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LARGEST = 1 << 40


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """What serving must know of a model; sizes are in bytes, in the type in which it is served."""

    name: str
    architecture: str
    layers: int
    #: Tokens of the longest sequence.
    context: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_heads: int
    head_size: int
    dtype: str
    #: The first and the last stage both need the embedding.
    is_tied: bool
    #: Weights of each layer; empty where they are not known.
    layer_bytes: tuple[int, ...] = ()
    embedding_bytes: int = 0
    head_bytes: int = 0

    @property
    def element(self) -> int:
        """Return the bytes of an element."""
        return DTYPES[self.dtype]

    @property
    def first_bytes(self) -> int:
        """Return the weights of the first stage besides its layers."""
        return self.embedding_bytes

    @property
    def last_bytes(self) -> int:
        """Return the weights of the last stage besides its layers."""
        return self.embedding_bytes if self.is_tied else self.head_bytes

    @property
    def total_bytes(self) -> int:
        """Return the weights of the whole model, each once."""
        return sum(self.layer_bytes) + self.embedding_bytes + (0 if self.is_tied else self.head_bytes)

    def count_cache(self, tokens: int) -> int:
        """Return the bytes of the keys and values of one layer for a number of tokens."""
        return 2 * self.kv_heads * self.head_size * self.element * tokens


def read_folder(folder: Path) -> ModelDescription:
    """Return the description of the model in a folder.

    Raises:
        UsageError: the folder has no model that can be served.
    """
    description = parse_config(_read(folder, CONFIG, MAX_CONFIG), name=folder.name)
    files = list_weight_files(folder)
    sizes: dict[str, int] = {}
    for file in files:
        sizes |= _read_sizes(folder / file, description.element)
    return _add_sizes(description, sizes, folder)


def list_weight_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the files with the model's weights.

    Raises:
        UsageError: there are none, or some are missing.
    """
    if (folder / INDEX).is_file():
        files = tuple(sorted(set(parse_index(_read(folder, INDEX, MAX_INDEX), folder=str(folder)).values())))
    elif (folder / SINGLE).is_file():
        files = (SINGLE,)
    else:
        raise UsageError(
            f"{folder}: there are no weights in safetensors files ({SINGLE}, or {INDEX} and the files that it names). "
            "Other files, such as pytorch_model.bin, become some with save_pretrained() of transformers."
        )
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise UsageError(
            f"{folder}: {missing[0]} is missing, one of {len(files)} files with weights: the copy is incomplete."
        )
    return files


def parse_index(text: str, *, folder: str) -> dict[str, str]:
    """Return the file of each tensor that an index names.

    Raises:
        UsageError: it is no index, or names files outside of the folder.
    """
    try:
        files = json.loads(text)["weight_map"]
        valid = all(
            isinstance(file, str) and file == Path(file).name and file.endswith(".safetensors")
            for file in files.values()
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{folder}: {INDEX} is not an index of safetensors files.") from None
    if not valid or not files:
        raise UsageError(f"{folder}: {INDEX} names files that are no safetensors files of this folder.")
    return dict(files)


def parse_config(text: str, *, name: str) -> ModelDescription:
    """Return the description without sizes of weights.

    Raises:
        UsageError: it is no configuration of a model that can be served.
    """
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(f"{name}: {CONFIG} is not the configuration of a model of transformers.")
    architecture = config["model_type"]
    if architecture not in ARCHITECTURES:
        raise UsageError(
            f"{name}: models of the architecture {architecture} are not served. These are: {', '.join(ARCHITECTURES)}."
        )
    if config.get("quantization_config"):
        raise UsageError(
            f"{name}: its weights are quantized (quantization_config); only {', '.join(DTYPES)} are served."
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if kind in _CHANGING_ROPES:
        raise UsageError(
            f"{name}: its positions change with the length of a sequence (rope_type {kind}), which is not served."
        )
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in DTYPES:
        raise UsageError(f"{name}: its type is {dtype}, and {', '.join(DTYPES)} are served.")
    hidden, heads = _number(config, "hidden_size", name), _number(config, "num_attention_heads", name)
    return ModelDescription(
        name=name,
        architecture=architecture,
        layers=_number(config, "num_hidden_layers", name),
        context=_number(config, "max_position_embeddings", name),
        hidden=hidden,
        intermediate=_number(config, "intermediate_size", name),
        vocabulary=_number(config, "vocab_size", name),
        kv_heads=_number(config, "num_key_value_heads", name, default=heads),
        head_size=_number(config, "head_dim", name, default=max(1, hidden // heads)),
        dtype=dtype,
        is_tied=bool(config.get("tie_word_embeddings", architecture in _TIED)),
    )


def estimate_sizes(description: ModelDescription, index: str) -> ModelDescription:
    """Return the description with sizes from an index alone, which has only their sum: all layers count as equal.

    Raises:
        UsageError: it is no index.
    """
    parse_index(index, folder=description.name)
    metadata = json.loads(index).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, bool) or not isinstance(total, int | float) or not 0 < total < _LARGEST:
        return description
    embedding = description.vocabulary * description.hidden * description.element
    head = 0 if description.is_tied else embedding
    layer = max(0, int(total) - embedding - head) // description.layers
    return _with_sizes(description, (layer,) * description.layers, embedding, head)


def _with_sizes(description: ModelDescription, layers: tuple[int, ...], embedding: int, head: int) -> ModelDescription:
    return replace(description, layer_bytes=layers, embedding_bytes=embedding, head_bytes=head)


def _add_sizes(description: ModelDescription, sizes: Mapping[str, int], folder: Path) -> ModelDescription:
    layers = [0] * description.layers
    for tensor, size in sizes.items():
        if match := _LAYER.match(tensor):
            if int(match[1]) >= len(layers):
                raise UsageError(
                    f"{folder}: there are weights of layer {match[1]}, and {CONFIG} names {len(layers)} layers."
                )
            layers[int(match[1])] += size
    needed = [_EMBEDDING] + ([] if description.is_tied else [_HEAD])
    absent = [tensor for tensor in needed if tensor not in sizes]
    absent += [f"model.layers.{layer}" for layer, size in enumerate(layers) if not size]
    if absent:
        raise UsageError(
            f"{folder}: the weights {absent[0]} are missing: the model's copy is incomplete, or not for text alone."
        )
    return _with_sizes(description, tuple(layers), sizes[_EMBEDDING], sizes.get(_HEAD, 0))


def _read_sizes(path: Path, element: int) -> dict[str, int]:
    """Return the bytes of each tensor of a safetensors file as it is served, from the file's header."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: Any = json.loads(file.read(length)) if 0 < length <= _MAX_HEADER else None
        return {
            name: math.prod(int(size) for size in tensor["shape"]) * element
            for name, tensor in header.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is not a safetensors file: the model's copy is incomplete.") from None


def _number(config: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _LARGEST:
        raise UsageError(f"{name}: {CONFIG} has {key} = {value!r}, and a positive number is needed.")
    return value


def _read(folder: Path, name: str, most: int) -> str:
    """Return a text of the model's folder."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder with a model: it must have {CONFIG} and weights in safetensors files."
        )
    try:
        with (folder / name).open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise UsageError(f"{folder / name} is larger than {most} bytes, so it is not what its name says.")
        return data.decode()
    except FileNotFoundError:
        raise UsageError(f"{folder}: there is no {name}, so this is no model of transformers.") from None
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{folder / name} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
