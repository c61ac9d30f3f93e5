"""Folders of models without torch: configurations, and headers of safetensors files whose weights are not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_launch.serving.model_files import ModelDescription

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SHAPES = {
    "model.embed_tokens.weight": [1000, 64],
    "lm_head.weight": [1000, 64],
    "model.norm.weight": [64],
    **{f"model.layers.{layer}.mlp.up_proj.weight": [128, 64 * (layer + 1)] for layer in range(4)},
}


def write_folder(
    folder: Path, *, shards: bool = False, shapes: dict[str, list[int]] | None = None, **config: Any
) -> Path:
    """Write a folder with a model of four layers, of which each is larger than the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    shapes = SHAPES if shapes is None else shapes
    if not shards:
        write_header(folder / "model.safetensors", shapes)
        return folder
    files = {tensor: f"model-{number:05}.safetensors" for number, tensor in enumerate(shapes)}
    for tensor, file in files.items():
        write_header(folder / file, {tensor: shapes[tensor]})
    index = {"metadata": {"total_size": 1 << 20}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_header(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write a safetensors file's header alone."""
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    data = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data)


def describe(*, layers: int = 32, layer_mib: int = 400, embedding_mib: int = 1000, **changes: Any) -> ModelDescription:
    """Return a model of some 15 GB."""
    values: dict[str, Any] = {
        "name": "big", "architecture": "llama", "layers": layers, "context": 8192, "hidden": 4096,
        "intermediate": 14336, "vocabulary": 128256, "kv_heads": 8, "head_size": 128, "dtype": "bfloat16",
        "is_tied": False, "layer_bytes": (layer_mib << 20,) * layers, "embedding_bytes": embedding_mib << 20,
        "head_bytes": embedding_mib << 20,
    }  # fmt: skip
    return ModelDescription(**values | changes)
