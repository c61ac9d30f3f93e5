"""The scripts of the notebook about fine-tuning compute with several ranks what one process computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.launch.example_notebooks import write_scripts
from tests.support.launch.launched_ranks import RankOutput, run_launched

pytestmark = pytest.mark.torch

_FIRST_START = {"TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notebook's scripts, and two models with random weights."""
    made = tmp_path_factory.mktemp("fine-tune")
    write_scripts("07-fine-tune-an-llm.ipynb", made)
    torch.manual_seed(3)
    for name, layers in (("tiny", 2), ("other", 1)):
        config = LlamaConfig(
            vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.1,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(made / name)
    return made


def run(folder: Path, script: str, ranks: int, out: str, *arguments: str, model: str = "tiny") -> list[RankOutput]:
    command = [str(folder / script), "--model", str(folder / model), "--out", str(folder / out), "--sequence", "24"]
    return run_launched([*command, *arguments], ranks, _FIRST_START)


def check_ended(ranks: list[RankOutput]) -> None:
    assert [rank.code for rank in ranks] == [0] * len(ranks), "\n".join(rank.stderr[-2000:] for rank in ranks)


def test_lora_of_two_ranks_is_that_of_one_process_with_the_whole_batch(folder: Path) -> None:
    """Losses on held-out text, and every matrix of the adapter; what was not trained is not saved."""
    for ranks in (1, 2):
        check_ended(run(folder, "lora.py", ranks, f"lora-{ranks}", "--steps", "8", "--every", "2", "--batch", "6"))
    alone, both = (json.loads((folder / f"lora-{ranks}" / "figures.json").read_text()) for ranks in (1, 2))
    assert both["ranks"] == 2
    assert both["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert alone["losses"][-1] < alone["losses"][0]
    first, second = (load_file(folder / f"lora-{ranks}" / "adapter_model.safetensors") for ranks in (1, 2))
    assert all("lora_" in name for name in first)
    assert first.keys() == second.keys()
    for name, matrix in first.items():
        torch.testing.assert_close(
            second[name], matrix, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_checkpoint_of_three_ranks_continues_on_two_with_equal_losses(folder: Path) -> None:
    """Weights and the optimizer's averages: each later loss is that of a training that was never divided."""
    check_ended(run(folder, "fsdp.py", 1, "whole", "--steps", "8", "--save-every", "8", "--batch", "6"))
    check_ended(run(folder, "fsdp.py", 3, "parts", "--steps", "4", "--batch", "6"))
    continued = run(folder, "fsdp.py", 2, "parts", "--steps", "8", "--batch", "6")
    check_ended(continued)
    assert "begins at step 4 with 2 ranks" in continued[0].stdout
    whole, parts = (json.loads((folder / name / "step-8" / "about.json").read_text()) for name in ("whole", "parts"))
    assert [ranks for _, ranks in parts["losses"]] == [3] * 4 + [2] * 4
    assert [loss for loss, _ in parts["losses"]] == pytest.approx([loss for loss, _ in whole["losses"]], rel=1e-4)
    # Only the last checkpoint stays.
    assert sorted(path.name for path in (folder / "parts").iterdir()) == ["step-8"]
    refused = run(folder, "fsdp.py", 1, "parts", "--steps", "9", "--batch", "6", model="other")
    assert refused[0].code == 1
    assert "is a checkpoint of" in refused[0].stderr
    assert "give another --out" in refused[0].stderr


def test_batch_that_does_not_divide_is_refused(folder: Path) -> None:
    """Before the model is loaded, on all ranks."""
    ranks = run(folder, "lora.py", 2, "refused", "--steps", "1", "--batch", "5")
    assert [rank.code for rank in ranks] == [1, 1]
    assert "--batch 5 does not divide between 2 ranks: take a multiple of 2" in ranks[0].stderr
