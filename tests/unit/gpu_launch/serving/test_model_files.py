"""What a model's folder says without its weights, and what is refused."""

from __future__ import annotations

import json

import pytest

from gpu_launch.errors import UsageError
from gpu_launch.serving import model_files
from tests.support.launch.model_folders import CONFIG, SHAPES, write_folder, write_header


@pytest.mark.parametrize("shards", [False, True])
def test_sizes_come_from_the_headers(tmp_path, shards):
    """In the type in which the model is served, which is half of that in the files."""
    model = model_files.read_folder(write_folder(tmp_path / "Llama-4L", shards=shards))
    assert model.name == "Llama-4L"
    assert model.layer_bytes == tuple(2 * 128 * 64 * size for size in (1, 2, 3, 4))
    assert (model.first_bytes, model.last_bytes) == (128_000, 128_000)
    assert model.total_bytes == sum(model.layer_bytes) + 256_000
    assert (model.context, model.kv_heads, model.head_size, model.dtype) == (4096, 2, 16, "bfloat16")
    assert model.count_cache(10) == 2 * 2 * 16 * 2 * 10


def test_tied_model_has_its_embedding_once(tmp_path):
    shapes = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    model = model_files.read_folder(write_folder(tmp_path, shapes=shapes, tie_word_embeddings=True))
    assert model.total_bytes == sum(model.layer_bytes) + 128_000
    assert model.last_bytes == model.first_bytes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, r"architecture mamba are not served. These are: cohere, gemma, .*llama"),
        ({"model_type": None}, "not the configuration of a model"),
        ({"quantization_config": {"bits": 4}}, "are quantized"),
        ({"rope_scaling": {"type": "longrope"}}, r"\(rope_type longrope\)"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, r"\(rope_type dynamic\)"),
        ({"dtype": "float8_e4m3fn"}, "its type is float8_e4m3fn"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0, and a positive number"),
        ({"hidden_size": True}, "hidden_size = True"),
        ({"num_hidden_layers": 3}, "weights of layer 3, and config.json names 3 layers"),
        ({"num_hidden_layers": 5}, "weights model.layers.4 are missing"),
    ],
)
def test_configurations_that_cannot_be_served(tmp_path, config, message):
    with pytest.raises(UsageError, match=message):
        model_files.read_folder(write_folder(tmp_path, **config))


def test_incomplete_folders(tmp_path):
    """Each says what is missing."""
    with pytest.raises(UsageError, match="is not a folder with a model"):
        model_files.read_folder(tmp_path / "none")
    with pytest.raises(UsageError, match=r"there is no config.json, so this is no model"):
        model_files.read_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UsageError, match="no weights in safetensors files"):
        model_files.read_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UsageError, match=r"model.safetensors is not a safetensors file"):
        model_files.read_folder(tmp_path)
    write_header(tmp_path / "model.safetensors", {"model.layers.0.weight": [4]})
    with pytest.raises(UsageError, match=r"model.embed_tokens.weight are missing"):
        model_files.read_folder(tmp_path)
    write_folder(tmp_path / "shards", shards=True)
    (tmp_path / "shards" / "model-00002.safetensors").unlink()
    with pytest.raises(UsageError, match=r"model-00002.safetensors is missing, one of 7 files"):
        model_files.read_folder(tmp_path / "shards")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "model.bin", 3])
def test_index_names_files_of_its_folder_alone(file):
    with pytest.raises(UsageError, match="names files that are no safetensors files of this folder"):
        model_files.parse_index(json.dumps({"weight_map": {"a": file}}), folder="m")


def test_too_large_configuration_is_not_read(tmp_path):
    (tmp_path / "config.json").write_text(" " * (model_files.MAX_CONFIG + 1))
    with pytest.raises(UsageError, match="is larger than"):
        model_files.read_folder(tmp_path)


def test_index_alone_gives_layers_of_one_size():
    """As a laptop sees a model; without the sum nothing is known."""
    plain = model_files.parse_config(json.dumps(CONFIG), name="m")
    index = {"metadata": {"total_size": 656_000}, "weight_map": {"a": "model.safetensors"}}
    model = model_files.estimate_sizes(plain, json.dumps(index))
    assert model.layer_bytes == (100_000,) * 4
    assert model.total_bytes == 656_000
    assert model_files.estimate_sizes(plain, json.dumps(index | {"metadata": {}})) == plain
    with pytest.raises(UsageError, match="is not an index"):
        model_files.estimate_sizes(plain, "[]")
