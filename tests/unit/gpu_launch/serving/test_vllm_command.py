"""vLLM's command lines, exactly. vLLM itself never ran here."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_launch.serving import settings, vllm_command
from gpu_launch.serving.settings import ServerSettings, ServingEngine

SETTINGS = ServerSettings(model="/models/Qwen3-8B", name="Qwen3-8B", context=4096, slots=16)


def build(node: int, nodes: int, cards: int) -> str:
    command = vllm_command.build_command(
        SETTINGS, Path("/models/Qwen3-8B"), node=node, nodes=nodes, cards=cards, master="10.77.0.5"
    )
    return " ".join(command)


def test_commands_of_two_nodes():
    """The second one has no server."""
    common = "vllm serve /models/Qwen3-8B --served-model-name Qwen3-8B --host 127.0.0.1 --port 8000 --max-num-seqs 16 --max-model-len 4096"
    two = "--pipeline-parallel-size 2 --nnodes 2 --node-rank {} --master-addr 10.77.0.5 --master-port 29555"
    assert build(0, 2, 1) == f"{common} {two.format(0)}"
    assert build(1, 2, 1) == f"{common} {two.format(1)} --headless"
    assert build(0, 1, 1) == common
    assert build(1, 2, 4) == f"{common} --tensor-parallel-size 4 {two.format(1)} --headless"


def test_variables_have_the_layers_and_no_rank():
    environ = {"RANK": "1", "LOCAL_RANK": "0", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "HOME": "/home/mia"}
    assert vllm_command.build_environ(environ, (range(20), range(20, 32))) == {
        "HOME": "/home/mia",
        "VLLM_PP_LAYER_PARTITION": "20,12",
    }
    assert vllm_command.build_environ(environ, (range(32),)) == {"HOME": "/home/mia"}
    assert vllm_command.build_environ(environ, ()) == {"HOME": "/home/mia"}


@pytest.mark.parametrize(
    "asked",
    [SETTINGS, ServerSettings(model="--port", name="x y", port=9000, idle_s=0, engine=ServingEngine.VLLM)],
)
def test_arguments_are_read_as_they_were_written(asked):
    assert settings.read_arguments(settings.write_arguments(asked)) == asked


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/models/Qwen3-8B/", "Qwen3-8B"),
        ("./tiny", "tiny"),
        ("models/mine/tiny", "tiny"),
        ("tiny", "tiny"),
    ],
)
def test_requests_call_a_model_by_its_last_part_or_its_name(model, name):
    assert settings.name_model(model) == name
