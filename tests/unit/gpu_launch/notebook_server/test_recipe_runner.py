"""Recipes of JupyterLab's page: the command's words, its errors, and what is read of a job's folder."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from gpu_launch import environment
from gpu_launch.broker.client import BrokerClient
from gpu_launch.common import run_folder
from gpu_launch.common.job_manifest import JobManifest, dump_json
from gpu_launch.errors import UsageError
from gpu_launch.notebook_server import recipe_runner
from gpu_launch.notebook_server.recipe_runner import RecipeRequest, RecipeRunner

RECIPE = {"RECIPE_NAME": "finetune", "RECIPE_PARAMETERS": json.dumps({"model": "models/tiny", "steps": "5"})}


def build_runner(home: Path, *, root: Path | None = None) -> RecipeRunner:
    """Build a runner whose broker is not asked."""
    env = environment.read({"HOME": str(home)})
    return RecipeRunner(cast("BrokerClient", None), env, root or home, ThreadPoolExecutor(1))


def write_job(home: Path, run_id: str, text: str) -> None:
    """Write a job's manifest."""
    run_folder.create_run(home, run_id).manifest.write_text(text)


def read_runs(runner: RecipeRunner, *run_ids: str) -> list[dict[str, Any]]:
    """Return what the page shows of these jobs."""
    return asyncio.run(runner.list_runs([{"run_id": run_id} for run_id in run_ids]))


def test_words_of_the_command() -> None:
    """What was left out is left to the recipe, and no value can become an option of its own."""
    plain = RecipeRequest(recipe="sweep", values={})
    assert plain.build_words() == ["recipe:sweep"]
    full = RecipeRequest(recipe="x", values={"a": "--gpus=9", "b": "1 2"}, gpus=2, model="RTX 5090", profile="llm")
    assert full.build_words() == [
        "--gpus=2", "--model=RTX 5090", "--profile=llm", "--set=a=--gpus=9", "--set=b=1 2", "recipe:x",
    ]  # fmt: skip


def test_jobs_that_are_recipes_are_listed_with_what_they_wrote(tmp_path: Path) -> None:
    """Launches, scripts, and jobs of another version are left out."""
    write_job(tmp_path, "run-1", dump_json(JobManifest(name="finetune", folder="gpu-launch/f-1", environ=RECIPE)))
    write_job(tmp_path, "run-2", dump_json(JobManifest(name="train.py", words=("train.py",))))
    write_job(tmp_path, "run-3", '{"version": 99}')
    write_job(tmp_path, "run-4", "no JSON")
    write_job(
        tmp_path, "run-5", dump_json(JobManifest(name="x", environ={"RECIPE_NAME": "x", "RECIPE_PARAMETERS": "["}))
    )
    runner = build_runner(tmp_path)
    (run,) = read_runs(runner, "run-1", "run-2", "run-3", "run-4", "run-5", "run-none")
    parameters = {"model": "models/tiny", "steps": "5"}
    assert run == {
        "run_id": "run-1",
        "recipe": "finetune",
        "parameters": parameters,
        "is_prediction": False,
        "folder": "gpu-launch/f-1",
        "chart_at": None,
        "result": None,
    }
    folder = tmp_path / "gpu-launch" / "f-1"
    folder.mkdir(parents=True)
    (folder / "loss.png").write_bytes(b"png")
    (folder / "result.json").write_text('{"loss": NaN, "tokens": 5}')
    (run,) = read_runs(runner, "run-1")
    assert run["chart_at"] == (folder / "loss.png").stat().st_mtime
    assert run["result"] == {"loss": "NaN", "tokens": 5}


@pytest.mark.parametrize("text", ["[1, 2]", "{", "{" + " " * recipe_runner._MAX_FILE_BYTES + "}", ""])
def test_a_result_that_is_none_is_left_out(tmp_path: Path, text: str) -> None:
    """The job writes this file, and a user may replace it."""
    write_job(tmp_path, "run-1", dump_json(JobManifest(name="finetune", folder="f", environ=RECIPE)))
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "result.json").write_text(text)
    (run,) = read_runs(build_runner(tmp_path), "run-1")
    assert run["result"] is None


def test_a_folder_outside_of_the_server_root_has_no_path(tmp_path: Path) -> None:
    """The browser could not read from there."""
    write_job(tmp_path, "run-1", dump_json(JobManifest(name="finetune", folder="f", environ=RECIPE)))
    (run,) = read_runs(build_runner(tmp_path, root=tmp_path / "notebooks"), "run-1")
    assert run["folder"] is None


@pytest.mark.process
def test_an_error_of_the_command_is_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its prefix; a command that does not end is ended."""
    for name in ("GPUHUB_URL", "GPUHUB_TOKEN", "GPUHUB_BROKER_URL", "JUPYTERHUB_API_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    runner = build_runner(tmp_path)
    request = RecipeRequest(recipe="finetune", values={})
    with pytest.raises(UsageError, match=r"^You are not logged in: gpu-launch login"):
        asyncio.run(runner.check(request))
    monkeypatch.setattr(recipe_runner, "_COMMAND_S", 0.01)
    with pytest.raises(UsageError, match="did not answer within"):
        asyncio.run(build_runner(tmp_path).start(request, predicts=True))
