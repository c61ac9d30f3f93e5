"""`gpu-launch run recipe:NAME` and `gpu-launch recipe`, against a hub over real HTTP."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.cli import main
from gpu_launch.common import job_manifest
from gpu_launch.options import command
from tests.support.hub.fake_hub import FakeHub
from tests.support.hub.laptop import logged_in
from tests.support.launch.model_folders import write_folder

LAB = """\
recipe:
  description: Counts words.
  parameters:
    data: {type: path}
    note: {default: plain}
num_nodes: 2
run: |
  wc -l < "$RECIPE_DATA" > result
  echo "$RECIPE_NOTE" >> result
"""
SETS = ["--set", "model=models/tiny", "--set", "data=datasets/x"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub; the home on the cluster has a model and a data set."""
    with logged_in(tmp_path, monkeypatch, {"x.py": "x"}) as hub:
        write_folder(hub.home / "models" / "tiny", shards=True)
        (hub.home / "datasets" / "x").mkdir(parents=True)
        yield hub


def _read_manifest(hub: FakeHub) -> job_manifest.JobManifest:
    run_id = hub.asked[-1]["run_id"]
    path = next((hub.home / ".gpu_launch/jobs").glob(f"{run_id}*/job.json"))
    return job_manifest.parse_manifest(path.read_text())


def test_shipped_recipe_is_a_launch_of_its_module(hub: FakeHub) -> None:
    """With the values as arguments and variables, a folder of its own, and nothing sent."""
    words = ["run", "-d", "--nnodes", "2", "--preload", "transformers", *SETS, "--set", "rate=1e-3", "recipe:finetune"]
    assert main.run_command(words) == 0
    manifest = _read_manifest(hub)
    options = command.parse_words(list(manifest.words))
    assert (options.module, options.script) == (True, "gpu_launch.recipes.finetune_main")
    arguments = dict(zip(options.arguments[::2], options.arguments[1::2], strict=True))
    assert (arguments["--model"], arguments["--data"]) == ("~/models/tiny", "~/datasets/x")
    assert (arguments["--rate"], arguments["--method"]) == ("1e-3", "lora")
    assert (manifest.name, manifest.task) == ("finetune", None)
    assert manifest.folder.startswith("gpu-launch/finetune-")
    assert (hub.home / manifest.folder).is_dir()
    assert manifest.environ["RECIPE_RATE"] == "1e-3"
    assert json.loads(manifest.environ["RECIPE_PARAMETERS"])["data"] == "~/datasets/x"
    assert (hub.asked[-1]["nnodes"], hub.asked[-1]["batch"]) == (2, True)


def test_prediction_and_dry_run_work(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command(["run", "-d", "--predict", *SETS, "recipe:finetune"]) == 0
    assert "--predict" in _read_manifest(hub).words
    asked = len(hub.asked)
    assert main.run_command(["run", "--dry-run", *SETS, "recipe:finetune"]) == 0
    out = capsys.readouterr().out
    assert "would send: nothing" in out
    assert "gpu_launch.recipes.finetune_main --model" in out
    assert len(hub.asked) == asked


def test_serving_has_its_port_and_is_never_quiet(hub: FakeHub) -> None:
    """It sleeps if that is asked for."""
    assert main.run_command(["run", "-d", "--sleep", "--set", "model=models/tiny", "recipe:serve"]) == 0
    assert (hub.asked[-1]["port"], hub.asked[-1]["sleeps"]) == (8000, True)
    words = _read_manifest(hub).words
    assert "--stacks-after=0s" in words
    assert words[-2:] == ("--", "~/models/tiny")


def test_sweep_is_an_array(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one GPU each; several for one task are refused."""
    assert main.run_command(["run", "--array", "0-2", *SETS, "recipe:sweep"]) == 0
    assert hub.asked[-1]["count"] == 3
    for flags in (["--gpus", "2"], ["--nnodes", "2"], ["--nproc-per-node", "2"]):
        assert main.run_command(["run", *flags, *SETS, "recipe:sweep"]) == 2
        assert "recipe:sweep uses one GPU. Several work on it as tasks of an array" in capsys.readouterr().err


@pytest.mark.process
def test_labs_recipe_gets_its_values_as_variables_alone(hub: FakeHub, tmp_path: Path) -> None:
    """No value is part of the commands; paths are absolute there, and the values are in parameters.json."""
    hub.recipes = {"count": LAB}
    data = "datasets/a & b.txt"
    (hub.home / data).write_text("one\ntwo\n")
    note = "$(touch broken) `touch broken`; 'x' \"y\""
    assert main.run_command(["run", "-d", "--set", f"data={data}", "--set", f"note={note}", "recipe:count"]) == 0
    manifest = _read_manifest(hub)
    assert manifest.task is not None
    assert note not in manifest.task.run
    assert data not in manifest.task.run
    folder = tmp_path / "job"
    folder.mkdir()
    environ = {"PATH": os.environ["PATH"], "HOME": str(hub.home), "SKYPILOT_NODE_RANK": "0"} | manifest.environ
    subprocess.run(["bash", "-c", manifest.task.run], env=environ, cwd=folder, check=True)
    assert (folder / "result").read_text() == f"2\n{note}\n"
    assert json.loads((folder / "parameters.json").read_text()) == {"data": f"~/{data}", "note": note}
    assert {path.name for path in folder.iterdir()} == {"result", "parameters.json"}


def test_labs_recipe_stands_before_a_shipped_one(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """And one with a mistake is listed with it, while the others work."""
    hub.recipes = {"evaluate": LAB, "broken": "run: x"}
    assert main.run_command(["recipe", "list", "--json"]) == 0
    views = {view["name"]: view for view in json.loads(capsys.readouterr().out)}
    assert list(views) == ["broken", "evaluate", "finetune", "serve", "sweep"]
    assert views["evaluate"]["description"] == "Counts words."
    assert "it has no head" in views["broken"]["error"]
    assert main.run_command(["run", "recipe:broken"]) == 2
    assert "Ask your administrator to correct it." in capsys.readouterr().err


def test_recipes_are_listed_and_explained(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Also with a broker of a version without recipes of the lab."""
    hub.recipes = None
    assert main.run_command(["recipe", "list"]) == 0
    out = capsys.readouterr().out
    assert "finetune  (gpu-launch)\n  Fine-tunes a causal language model" in out
    assert "model=… data=… method=lora epochs=1" in out
    assert main.run_command(["recipe", "show", "finetune"]) == 0
    out = capsys.readouterr().out
    assert "gpu-launch run --set model=MODEL --set data=PATH recipe:finetune" in out
    assert any(line.split()[:3] == ["epochs", "1", "number,"] for line in out.splitlines())


def test_file_of_ones_own_is_a_recipe_too(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """To try it out before the lab gets it."""
    Path("count.yaml").write_text(LAB)
    assert main.run_command(["recipe", "show", "count.yaml"]) == 0
    assert "recipe:count.yaml" in capsys.readouterr().out
    assert main.run_command(["run", "-d", "--set", "data=datasets/x", "recipe:count.yaml"]) == 0
    assert _read_manifest(hub).name == "count"
    assert main.run_command(["run", "count.yaml"]) == 2
    assert "recipe is the head of a recipe: run the file as recipe:FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe:finetun"], "there is no such recipe. Did you mean recipe:finetune? There are evaluate, finetune"),
        (["recipe:../x"], "a name of lower-case letters, digits and dashes is needed"),
        (["recipe:none.yaml"], "it cannot be read: No such file or directory."),
        (["recipe:finetune"], "recipe:finetune needs --set model=MODEL --set data=PATH."),
        ([*SETS, "--set", "epochs=0", "recipe:finetune"], "--set epochs='0': a number from 0.01 to 1000 is needed."),
        ([*SETS, "--set", "epoch=1", "recipe:finetune"], "Did you mean epochs?"),
        ([*SETS, "recipe:finetune", "--epochs"], "options and --set NAME=VALUE come before recipe:NAME."),
        ([*SETS, "--no-workdir", "recipe:finetune"], "--no-workdir is not for recipes"),
        ([*SETS, "--workdir", ".", "recipe:finetune"], "--workdir is not for recipes"),
        ([*SETS, "-e", "RECIPE_RATE=1", "recipe:finetune"], "--env RECIPE_RATE: the recipe sets this variable"),
        ([*SETS, "--gpus", "99", "recipe:finetune"], "recipe:finetune: --gpus 99: the cluster has"),
        (
            ["--set", "model=models/tiny", "--set", "data=datasets/y", "recipe:finetune"],
            "--set data=datasets/y: there is no datasets/y in your home on the cluster.",
        ),
        (
            ["--set", "model=home:datasets/x", "--set", "data=datasets/x", "recipe:finetune"],
            "this folder of your home on the cluster has no config.json",
        ),
        (["--set", "a=1", "x.py"], "--set a=1: parameters are for recipes, and x.py is none"),
    ],
)
def test_refusals_come_before_anything_is_asked_for(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main.run_command(["run", *words]) == 2
    assert message in capsys.readouterr().err
    assert not hub.asked


def test_shared_model_is_left_to_the_job(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """A laptop does not see the cluster's models."""
    assert main.run_command(["run", "-d", "--set", "model=Qwen/Qwen3-8B", "recipe:serve"]) == 0
    assert _read_manifest(hub).words[-1] == "Qwen/Qwen3-8B"
    assert "Qwen/Qwen3-8B is not in your home" in capsys.readouterr().err


def test_notebooks_terminal_sees_everything(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models by their real folder, and files outside the home too."""
    for name in ("GPUHUB_URL", "GPUHUB_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("GPUHUB_BROKER_URL", f"{hub.url}/services/broker")
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "the-token-of-ada")
    monkeypatch.setenv("HOME", str(hub.home))
    assert main.run_command(["run", "--dry-run", *SETS, "recipe:finetune"]) == 0
    assert f"--model {hub.home}/models/tiny" in capsys.readouterr().out
    assert (
        main.run_command(["run", "--set", "model=models/tiny", "--set", "data=/datasets/none", "recipe:finetune"]) == 2
    )
    assert "--set data=/datasets/none: there is no such file or folder." in capsys.readouterr().err
    assert main.run_command(["run", "--set", "model=models/none", "--set", "data=datasets/x", "recipe:finetune"]) == 2
    assert "--set model=models/none: there is no such folder" in capsys.readouterr().err
