"""The command `serve`: what it refuses before anything is asked for, and the job that it asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.cli import main
from gpu_launch.cli.submission import job_submission
from gpu_launch.serving import settings
from tests.support.hub.fake_hub import FakeHub
from tests.support.hub.laptop import logged_in
from tests.support.launch.model_folders import write_folder

LARGE = {"hidden_size": 8192, "vocab_size": 128256, "num_hidden_layers": 80, "num_attention_heads": 64}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub; the home on the cluster has a small model and a large one."""
    with logged_in(tmp_path, monkeypatch, {"x.py": "x"}) as hub:
        write_folder(hub.home / "models" / "Small", shards=True)
        large = write_folder(hub.home / "models" / "Large", shards=True, **LARGE)
        index = large / "model.safetensors.index.json"
        index.write_text(json.dumps(json.loads(index.read_text()) | {"metadata": {"total_size": 140_000_000_000}}))
        write_folder(hub.home / "models" / "Other", model_type="mamba")
        yield hub


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[job_submission.JobSubmission, dict[str, bool]]]:
    """The jobs that would be sent."""
    ran: list[tuple[job_submission.JobSubmission, dict[str, bool]]] = []
    monkeypatch.setattr(job_submission, "run", lambda _context, job, **how: ran.append((job, how)))
    return ran


def test_serve_runs_the_server_on_the_nodes(hub: FakeHub, jobs, capsys: pytest.CaptureFixture[str]) -> None:
    """With its port and users, nothing sent, and cards that are large enough."""
    words = ["serve", "--nnodes", "2", "--slots", "4", "--context", "1024", "--idle", "1h", "--allow-user", "ben"]
    assert main.run_command([*words, "-d", "home:models/Small"]) == 0
    ((job, how),) = jobs
    assert (job.nnodes, job.nproc_per_node, job.port, job.port_users, job.load) == (2, 1, 8000, ("ben",), None)
    assert job.manifest.name == "serve Small"
    assert job.sleeps
    assert how == {"detach": True, "dry_run": False}
    module = job.manifest.words.index(settings.MODULE)
    assert "--module" in job.manifest.words[:module]
    assert "--stacks-after=0s" in job.manifest.words
    served = settings.read_arguments(job.manifest.words[module + 1 :])
    assert (served.model, served.name, served.slots, served.context, served.idle_s) == (
        "models/Small",
        "Small",
        4,
        1024,
        3600,
    )
    assert "0.0 GiB of caches, divided between 2 cards" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--end"], ["--idle", "0s"]])
def test_serve_that_never_sleeps(hub: FakeHub, jobs, words: list[str]) -> None:
    """The job ends without requests, or never."""
    assert main.run_command(["serve", *words, "-d", "home:models/Small"]) == 0
    assert not jobs[0][0].sleeps


def test_shared_model_is_left_to_the_job(hub: FakeHub, jobs, capsys: pytest.CaptureFixture[str]) -> None:
    """A laptop does not see the cluster's folder of models."""
    for model, name in (("/models/Qwen3-8B", "Qwen3-8B"), ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")):
        assert main.run_command(["serve", model]) == 0
        job = jobs.pop()[0]
        assert job.manifest.words[-1] == model
        assert f"{name}: it is checked when the job starts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["home:models/Large"], "Large does not fit: it has 130"),
        (["home:models/Large", "--nnodes", "2"], "It fits no set of the cluster's 4 cards with these settings"),
        (["models/Other"], "models of the architecture mamba are not served"),
        (["home:models/None"], "this folder of your home there has no config.json"),
        (["home:"], "a folder in your home on the cluster is needed"),
        (["~/models/Small"], "such as home:models/Qwen3-8B"),
        (["home:models/Small", "--context", "5000"], "--context 5000: Small has sequences of 4096 tokens at most"),
        (["home:models/Small", "--nproc-per-node", "5"], "5 cards are more than Small has layers, 4"),
        (["home:models/Small", "--nnodes", "1:2"], "one number of nodes is needed"),
        (["home:models/Small", "--idle", "soon"], "--idle soon: a span of time"),
        (["home:models/Small", "--slots", "0"], "--slots"),
        (["home:models/Small", "--port", "80"], "--port"),
        (["home:models/Small", "--engine", "llama.cpp"], "--engine"),
        (["home:models/Small", "--allow-user", "Ben!"], "--allow-user Ben!"),
        (["home:models/Small", "--name", "x" * 101], "a model's name has 1 to 100"),
        (["home:models/Small", "--model", "RTX 3090"], "--model RTX 3090: the cluster has"),
    ],
)
def test_refusals_come_before_anything_is_asked_for(
    hub: FakeHub, jobs, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main.run_command(["serve", *words]) == 2
    assert message in capsys.readouterr().err
    assert not jobs
    assert not hub.asked


def test_dry_run_shows_the_request(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """And asks for nothing."""
    assert main.run_command(["serve", "--dry-run", "--nnodes", "2", "models/Small"]) == 0
    out = capsys.readouterr().out
    assert "would send: nothing" in out
    assert "on each of 2 nodes" in out
    assert "port:       8000, at an address of the hub for you" in out
    assert not hub.asked


def test_notebooks_terminal_sees_the_model_itself(
    hub: FakeHub, jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the sizes of its weights; a folder that other nodes lack is refused."""
    for name in ("GPUHUB_URL", "GPUHUB_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("GPUHUB_BROKER_URL", f"{hub.url}/services/broker")
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "the-token-of-ada")
    monkeypatch.setenv("HOME", str(hub.home))
    assert main.run_command(["serve", "home:models/Small"]) == 0
    assert jobs.pop()[0].manifest.words[-1] == str(hub.home / "models" / "Small")
    outside = write_folder(tmp_path / "scratch" / "Small")
    assert main.run_command(["serve", str(outside)]) == 2
    assert "is not on other nodes" in capsys.readouterr().err
    assert main.run_command(["serve", "lab/None"]) == 2
    assert "no model of that name" in capsys.readouterr().err
    assert not jobs
