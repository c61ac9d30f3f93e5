"""Stages of a divided model in one process, compared with transformers token by token, for each architecture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_launch.errors import UsageError
from gpu_launch.serving import model_files
from gpu_launch.serving.partition import ServingNeed
from gpu_launch.serving.stage import Stage, choose_token
from gpu_launch.serving.steps import Row, Sampling, Step
from tests.support.launch import tiny_model

pytestmark = pytest.mark.torch

WINDOW = {"sliding_window": 6}
CONFIGS = {
    "cohere": {},
    "gemma": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, **WINDOW},
    "glm4": {"head_dim": 16},
    "llama": {},
    "mistral": WINDOW,
    "olmo": {},
    "olmo2": {},
    "phi3": {"sliding_window": None},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, **WINDOW},
    "qwen3": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1, 0]},
    "stablelm": {},
    "starcoder2": {},
}
NEED = ServingNeed(slots=3, context=64)
CPU = torch.device("cpu")
PROMPT, NUMBER = list(range(5, 16)), 12


def load(folder, *divisions):
    """Return the stages of a model."""
    model = model_files.read_folder(folder)
    return [Stage(folder, model, layers, NEED, CPU) for layers in divisions]


def run(stages, step):
    """Return what the last stage says of a step."""
    hidden = None
    for stage in stages:
        hidden = stage.compute(step, hidden)
    return hidden


def test_every_architecture_that_is_served_is_tested():
    assert set(CONFIGS) == set(model_files.ARCHITECTURES)


@pytest.mark.parametrize("kind", CONFIGS)
def test_three_uneven_stages_continue_as_the_whole_model_does(tmp_path, kind):
    """A prompt in two parts in the second slot, then token by token beside an empty first one."""
    whole = tiny_model.write_model(tmp_path, kind, **CONFIGS[kind])
    whole.generation_config.eos_token_id = None
    expected = tiny_model.generate(whole, PROMPT, NUMBER)
    stages = load(tmp_path, range(1), range(1, 3), range(3, 5))
    first = Step(first_slot=1, rows=(Row(start=0, tokens=tuple(PROMPT[:4])),), samples=False)
    assert run(stages, first) is None
    tokens = run(stages, replace(first, rows=(Row(start=4, tokens=tuple(PROMPT[4:])),), samples=True))
    while len(tokens) < NUMBER:
        place = len(PROMPT) + len(tokens) - 1
        rows = (Row(start=0, tokens=(0,)), Row(start=place, tokens=(tokens[-1],)))
        tokens.append(run(stages, Step(first_slot=0, rows=rows, samples=True))[1])
    assert tokens[: len(expected)] == expected
    # Neither nothing nor one token again and again.
    assert len(set(expected)) > 1


def test_stage_has_the_weights_of_its_layers_alone(tmp_path):
    """And the first and the last one what is before and after the layers."""
    whole = tiny_model.write_model(tmp_path, shards=True)
    sizes = [
        sum(parameter.numel() for parameter in stage._model.parameters())
        for stage in load(tmp_path, range(2), range(2, 4), range(4, 5))
    ]
    layer = sum(parameter.numel() for parameter in whole.model.layers[0].parameters())
    embedding = whole.model.embed_tokens.weight.numel()
    assert sizes == [2 * layer + embedding, 2 * layer, layer + embedding + whole.model.norm.weight.numel()]


def test_weights_of_another_shape_are_refused(tmp_path):
    tiny_model.write_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": 64'))
    with pytest.raises(
        UsageError, match=r"mlp.gate_proj.weight have the shape \(48, 32\), and config.json means \(64, 32\)"
    ):
        load(tmp_path, range(5))


def test_draws_repeat_with_the_seed_and_keep_to_top_p():
    """Half of the probability is on token 3; the place in the sequence changes the draw."""
    logits = torch.tensor([0.5, 0.1, 0.2, 3.0]).log()
    draws = [choose_token(logits, Sampling(temperature=1, seed=5), place) for place in range(200)]
    assert draws == [choose_token(logits, Sampling(temperature=1, seed=5), place) for place in range(200)]
    assert set(draws) == {0, 1, 2, 3}
    assert 140 < draws.count(3) < 180
    assert draws != [choose_token(logits, Sampling(temperature=1, seed=6), place) for place in range(200)]
    narrow = Sampling(temperature=1, top_p=0.5, seed=5)
    assert {choose_token(logits, narrow, place) for place in range(50)} == {3}
    assert choose_token(logits, Sampling(), 0) == 3
