"""The shipped recipes, from the command line to their results, with a tiny model of random weights.

The job's own words and variables are what is run, by ranks as a launch starts them.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu_launch.cli import main
from gpu_launch.common import job_manifest
from gpu_launch.options import command
from gpu_launch.recipes.trainer import Trainer, TrainerSettings
from tests.support.hub.fake_hub import FakeHub
from tests.support.hub.laptop import logged_in
from tests.support.launch.launched_ranks import RankOutput, run_launched
from tests.support.launch.tiny_model import write_model

pytestmark = pytest.mark.torch

SETS = ("model=models/tiny", "data=datasets/topics", "sequence=32", "batch=4")
FAST = ("rate=0.01", "adapter_rank=4", "every=4")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub; the home on the cluster has a tiny model and some text."""
    with logged_in(tmp_path, monkeypatch, {"x.py": "x"}) as hub:
        write_model(hub.home / "models" / "tiny")
        (hub.home / "datasets" / "topics").mkdir(parents=True)
        text = "".join(topics[name] for name in sorted(topics))[:9000]
        plain = "".join(character for character in text if 32 <= ord(character) < 127)
        (hub.home / "datasets" / "topics" / "a.txt").write_text(plain)
        yield hub


class Job:
    """A recipe's job, as it is submitted."""

    def __init__(self, hub: FakeHub, recipe: str, *sets: str, flags: tuple[str, ...] = ()) -> None:
        words = [word for text in sets for word in ("--set", text)]
        assert main.run_command(["run", "-d", *flags, *words, f"recipe:{recipe}"]) == 0
        asked = hub.asked[-1]
        run_id = asked.get("job", asked)["run_id"]
        files = sorted((hub.home / ".gpu_launch/jobs").glob(f"{run_id}*/job.json"))
        self.tasks = [job_manifest.parse_manifest(file.read_text()) for file in files]
        self.folder = hub.home / self.tasks[0].folder
        self._home = hub.home

    def run(self, ranks: int = 1, task: int = 0) -> list[RankOutput]:
        """Run it in this number of ranks, and return what became of each."""
        return run_launched(self.build_command(task), ranks, self.build_environ(task), cwd=self.folder)

    def build_command(self, task: int = 0) -> list[str]:
        options = command.parse_words(list(self.tasks[task].words))
        return ["-m", options.script, *options.arguments]

    def build_environ(self, task: int = 0) -> dict[str, str]:
        return {"HOME": str(self._home)} | self.tasks[task].environ

    def read(self, name: str = "result.json") -> Any:
        return json.loads((self.folder / name).read_text())

    def read_metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def check_ended(ranks: list[RankOutput]) -> None:
    assert [rank.code for rank in ranks] == [0] * len(ranks), "\n".join(rank.stderr[-2000:] for rank in ranks)


def test_finetune_writes_adapter_metrics_and_curve_which_evaluate_reads(hub: FakeHub) -> None:
    """The loss falls, the merged model is the model with the adapter, and its held-out loss is measured again."""
    job = Job(hub, "finetune", *SETS, *FAST, "steps=16", "merge=true")
    check_ended(job.run())
    metrics = job.read_metrics()
    assert [line["step"] for line in metrics] == [4, 8, 12, 16]
    assert metrics[-1]["held_out_loss"] < metrics[0]["held_out_loss"]
    assert all(line["tokens_per_s"] > 0 for line in metrics)
    assert (job.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert job.read("parameters.json")["data"] == "~/datasets/topics"
    result = job.read()
    assert (result["steps"], result["artefacts"]) == (16, ["adapter", "model"])
    after = evaluate(hub, f"adapter={(job.folder / 'adapter').relative_to(hub.home)}")
    assert after["loss"] == pytest.approx(result["held_out_loss"], rel=1e-4)
    assert after["perplexity"] == pytest.approx(math.exp(after["loss"]))
    assert 0 <= after["accuracy"] <= 1
    merged = evaluate(hub, f"model={(job.folder / 'model').relative_to(hub.home)}")
    assert merged["loss"] == pytest.approx(after["loss"], rel=1e-4)
    assert AutoTokenizer.from_pretrained(job.folder / "model")("a").input_ids == [65]


def evaluate(hub: FakeHub, *sets: str, ranks: int = 1) -> Any:
    job = Job(hub, "evaluate", *SETS, "held_out=0.1", *sets)
    check_ended(job.run(ranks))
    return job.read()


def test_ranks_share_the_work(hub: FakeHub) -> None:
    """Two ranks with half of the batch each train and measure as one; all weights are trained."""
    losses = []
    for ranks, batch in ((1, 4), (2, 2)):
        job = Job(hub, "finetune", *SETS, f"batch={batch}", "method=full", "steps=6", "every=3", "rate=0.001")
        check_ended(job.run(ranks))
        losses.append([line["held_out_loss"] for line in job.read_metrics()])
        assert job.read()["artefacts"] == ["model"]
        AutoModelForCausalLM.from_pretrained(job.folder / "model")
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    alone, both = (evaluate(hub, ranks=ranks) for ranks in (1, 2))
    assert both == pytest.approx(alone, rel=1e-5)


#: Torch draws other numbers in rank 1 from the same seed, as another model of cards does.
OTHER_NUMBERS = """
    import os, sys, torch
    from pathlib import Path
    from torch.nn.utils import parameters_to_vector

    seed = torch.manual_seed
    torch.manual_seed = lambda value: seed(value + int(os.environ["RANK"]))
    from gpu_launch.recipes.causal_model import joined_group
    from gpu_launch.recipes.trainer import Trainer, TrainerSettings

    model, data, folder = map(Path, sys.argv[1:])
    with joined_group():
        trainer = Trainer(TrainerSettings(model=model, data=data, steps=2, batch=2, sequence=32), folder)
        trained = lambda: parameters_to_vector(p for p in trainer.model.parameters() if p.requires_grad).tolist()
        before = trained()
        trainer.train()
    torch.save((before, trained()), folder / f"rank-{os.environ['RANK']}.pt")
"""


def test_ranks_that_draw_other_numbers_train_one_adapter(hub: FakeHub, tmp_path: Path) -> None:
    """Rank 0's adapter is the one that all ranks train."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(OTHER_NUMBERS))
    folders = (hub.home / "models/tiny", hub.home / "datasets/topics", tmp_path)
    check_ended(run_launched([str(script), *map(str, folders)], 2, {"HOME": str(hub.home)}))
    (drawn, trained), (others, also_trained) = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    assert drawn != others
    assert trained == also_trained != drawn


def test_interrupted_fine_tuning_continues(hub: FakeHub) -> None:
    """SIGTERM leaves a checkpoint without a result; the same job ends later as one that was never interrupted."""
    whole = Job(hub, "finetune", *SETS, *FAST, "steps=40")
    check_ended(whole.run())
    job = Job(hub, "finetune", *SETS, *FAST, "steps=40")
    with subprocess.Popen(
        [sys.executable, "-m", "gpu_launch.worker.rank_main", *job.build_command()],
        cwd=job.folder,
        env=_build_rank_environ(job),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("step 4 of 40")
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(timeout=60) == 0
    assert (job.folder / "checkpoint.pt").exists()
    assert not (job.folder / "result.json").exists()
    stopped = job.read_metrics()[-1]["step"]
    assert 4 <= stopped < 40
    again = job.run()
    check_ended(again)
    assert f"continues after step {stopped:g}" in again[0].stdout
    assert job.read()["held_out_loss"] == pytest.approx(whole.read()["held_out_loss"], rel=1e-4)
    # A job that starts again after its end changes nothing.
    check_ended(job.run())
    assert job.read()["steps"] == 40


def test_checkpoint_does_not_wait_for_an_evaluation(hub: FakeHub, tmp_path: Path) -> None:
    """An evaluation can take minutes: it comes after the checkpoint, and not at all after a SIGTERM."""
    settings = TrainerSettings(
        model=hub.home / "models/tiny", data=hub.home / "datasets/topics", steps=9, every=3, batch=2, sequence=32
    )
    trainer = Trainer(settings, tmp_path / "run")
    evaluate, build_batch, found = trainer._evaluate, trainer._build_batch, []

    def read_step() -> int:
        return int(torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)["step"])

    def note() -> float:
        found.append(read_step())
        return evaluate()

    def build(step: int) -> Any:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return build_batch(step)

    trainer._evaluate, trainer._build_batch = note, build  # type: ignore[method-assign]
    result = trainer.train()
    assert (result.is_interrupted, result.steps, found, read_step()) == (True, 5, [3], 5)


def _build_rank_environ(job: Job) -> dict[str, str]:
    return os.environ | job.build_environ() | {"OMP_NUM_THREADS": "1"}


def test_sweep_shares_a_study_between_tasks(hub: FakeHub) -> None:
    """And ends with values that recipe:finetune takes."""
    job = Job(hub, "sweep", *SETS, "steps=4", "every=2", "trials=2", "most_adapter_rank=8", flags=("--array", "0-1"))
    for task in range(2):
        check_ended(job.run(task=task))
    result = job.read()
    assert result["trials"] == 4
    assert (job.folder / "loss.png").exists()
    assert sorted(path.name for path in job.folder.glob("trial-*")) == [f"trial-{number}" for number in range(4)]
    assert "--set rate=" in result["train_with"]
    assert result["train_with"].endswith("recipe:finetune")
    # A task that starts again has done its trials.
    check_ended(job.run(task=1))
    assert job.read()["trials"] == 4


def test_serve_answers_until_nobody_asks(hub: FakeHub) -> None:
    """With the arguments of the recipe, from the model's folder in the home."""
    job = Job(hub, "serve", "model=models/tiny", "idle_s=3", "engine=transformers")
    began = time.monotonic()
    ranks = job.run()
    check_ended(ranks)
    assert "tiny is loaded in" in ranks[0].stdout
    assert time.monotonic() - began > 3


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("sequence=100000",), "fewer than one sequence of 100000: set a shorter sequence."),
        (("batch=4096",), "fewer than batch × GPUs = 4096 × 1: set a smaller batch or a shorter sequence."),
    ],
)
def test_data_that_does_not_fit_is_refused(hub: FakeHub, sets: tuple[str, ...], message: str) -> None:
    """In one line, with exit code 2."""
    (rank,) = Job(hub, "finetune", *SETS, *sets).run()
    assert rank.code == 2
    assert message in rank.stderr
    assert "Traceback" not in rank.stderr


def test_checkpoint_of_another_method_is_refused(hub: FakeHub) -> None:
    job = Job(hub, "finetune", *SETS, "steps=2")
    torch.save({"step": 1, "weights": {"other.weight": torch.zeros(1)}, "optimizer": {}}, job.folder / "checkpoint.pt")
    (rank,) = job.run()
    assert rank.code == 2
    assert "is a checkpoint of another model or method: it has other.weight" in rank.stderr
