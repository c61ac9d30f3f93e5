"""Recipes as detached jobs on this machine: from the command line, by the real driver, workers and ranks, to their files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.cli import main
from gpu_launch.common import job_manifest
from tests.support.hub.fake_hub import FakeHub
from tests.support.hub.laptop import logged_in
from tests.support.launch.detached_jobs import Job
from tests.support.launch.tiny_model import write_model

#: Two processes import transformers and peft, on a busy machine for minutes.
_DEADLINE_S = 480
LAB = """\
recipe:
  description: Counts the lines of a file on each node.
  parameters:
    data: {type: path}
    note: {default: plain}
num_nodes: 2
setup: test -f "$RECIPE_DATA"
run: |
  echo "$(wc -l < "$RECIPE_DATA") $RECIPE_NOTE" > "lines-$SKYPILOT_NODE_RANK"
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub; the home on the cluster has a tiny model and some text."""
    with logged_in(tmp_path, monkeypatch, {"x.py": "x"}) as hub:
        write_model(hub.home / "models" / "tiny")
        (hub.home / "datasets").mkdir()
        (hub.home / "datasets" / "a b.txt").write_text("Some text to train on.\n" * 40)
        (hub.home / "datasets" / "one line.txt").write_text("Some text to train on. " * 40)
        yield hub


def run_job(hub: FakeHub, *words: str) -> Job:
    """Submit a job for two nodes, run it to its end, and return it."""
    assert main.run_command(["run", "-d", *words]) == 0
    run_id = hub.asked[-1]["run_id"]
    manifest = job_manifest.parse_manifest((hub.home / ".gpu_launch/jobs" / run_id / "job.json").read_text())
    job = Job(hub.home, 2)
    job.send(*manifest.words, task=manifest.task, **manifest.environ)
    try:
        job.start()
        assert job.end(_DEADLINE_S) == 0, job.output
    finally:
        job.close()
    return job


def test_fine_tuning_over_two_nodes(hub: FakeHub) -> None:
    """Both ranks train together, and rank 0 writes what there is to keep."""
    sets = ("model=models/tiny", "data=datasets/one line.txt", "sequence=16", "batch=2", "steps=4", "every=2")
    job = run_job(hub, "--nnodes", "2", *(word for text in sets for word in ("--set", text)), "recipe:finetune")
    metrics = [json.loads(line) for line in (job.work / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [2, 4]
    assert json.loads((job.work / "result.json").read_text())["artefacts"] == ["adapter"]
    assert (job.work / "adapter" / "adapter_model.safetensors").is_file()
    assert "step 4 of 4  loss" in job.output
    assert json.loads((job.work / "parameters.json").read_text())["data"] == "~/datasets/one line.txt"


def test_labs_commands_over_two_nodes(hub: FakeHub) -> None:
    """`setup` and `run` find the data by an absolute path, and a value is never run."""
    hub.recipes = {"count": LAB}
    note = "$(touch broken) 'x' \"y\""
    job = run_job(hub, "--set", "data=datasets/a b.txt", "--set", f"note={note}", "recipe:count")
    assert [(job.work / f"lines-{rank}").read_text() for rank in range(2)] == [f"40 {note}\n"] * 2
    assert not (job.work / "broken").exists()
    assert json.loads((job.work / "parameters.json").read_text()) == {"data": "~/datasets/a b.txt", "note": note}
