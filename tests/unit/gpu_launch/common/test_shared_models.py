"""The cluster's models in a user's cache, as huggingface_hub reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError

from gpu_launch.common.shared_models import VARIABLE, find_cache, link_models

OLD, NEW = "a" * 40, "b" * 40
NAME = "models--lab--tiny"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder of models with one, which no program may write to."""
    folder = tmp_path / "models"
    publish(folder, OLD)
    return folder


def publish(folder: Path, commit: str) -> None:
    """Add a revision in Hugging Face's format, and name it `main`."""
    model = folder / "hub" / NAME
    (model / "blobs").mkdir(parents=True, exist_ok=True)
    (model / "blobs" / commit[:8]).write_text(commit)
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "snapshots" / commit / "config.json").symlink_to(f"../../blobs/{commit[:8]}")
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(commit)


def link(models: Path, home: Path) -> int:
    return link_models({VARIABLE: str(models)}, home)


def read(home: Path, revision: str = "main") -> str:
    """Return the model's file as huggingface_hub finds it without a network."""
    cache = home / ".cache/huggingface/hub"
    path = hf_hub_download("lab/tiny", "config.json", revision=revision, cache_dir=cache, local_files_only=True)
    return Path(path).read_text()


def test_model_is_found_by_its_name_without_a_network(models: Path, tmp_path: Path) -> None:
    """Nothing is copied but the revision's name; a second container changes nothing."""
    home = tmp_path / "home"
    with pytest.raises(LocalEntryNotFoundError):
        read(home)
    assert [link(models, home), link(models, home)] == [1, 1]
    assert (read(home), read(home, OLD)) == (OLD, OLD)
    own = home / ".cache/huggingface/hub" / NAME
    assert sorted(path.name for path in own.rglob("*")) == sorted(["refs", "main", "snapshots", OLD])


def test_new_revision_of_the_cluster_replaces_the_old_one(models: Path, tmp_path: Path) -> None:
    """A revision that the administrator removed leaves no dangling link."""
    link(models, tmp_path)
    publish(models, NEW)
    link(models, tmp_path)
    assert (read(tmp_path), read(tmp_path, OLD)) == (NEW, OLD)
    (models / "hub" / NAME / "snapshots" / OLD / "config.json").unlink()
    (models / "hub" / NAME / "snapshots" / OLD).rmdir()
    link(models, tmp_path)
    assert [path.name for path in (tmp_path / ".cache/huggingface/hub" / NAME / "snapshots").iterdir()] == [NEW]


def test_what_the_user_downloaded_stays(models: Path, tmp_path: Path) -> None:
    """A newer revision in the home keeps its name; the cluster's is there by its commit."""
    own = tmp_path / ".cache/huggingface/hub" / NAME
    (own / "snapshots" / NEW).mkdir(parents=True)
    (own / "snapshots" / NEW / "config.json").write_text("mine")
    (own / "refs").mkdir()
    (own / "refs" / "main").write_text(NEW)
    link(models, tmp_path)
    assert (read(tmp_path), read(tmp_path, OLD)) == ("mine", OLD)


def test_other_names_are_not_linked(models: Path, tmp_path: Path) -> None:
    """Nothing that could lead out of the cache, and no half model."""
    (models / "hub" / "version.txt").write_text("1")
    (models / "hub" / "models--half").mkdir()
    (models / "hub" / NAME / "snapshots" / "not-a-commit").mkdir()
    (models / "hub" / NAME / "refs" / "bad").write_text("../../../etc")
    assert link(models, tmp_path) == 1
    own = tmp_path / ".cache/huggingface/hub"
    assert [path.name for path in own.iterdir()] == [NAME]
    assert sorted(path.name for path in (own / NAME).rglob("*")) == sorted(["refs", "main", "snapshots", OLD])


def test_without_models_or_a_writable_cache_nothing_fails(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A cluster without models, an empty folder, and a home in which the cache is a file."""
    assert link_models({}, tmp_path) == 0
    assert link(tmp_path / "nowhere", tmp_path) == 0
    assert not (tmp_path / ".cache").exists()
    (tmp_path / ".cache").write_text("")
    assert link(models, tmp_path) == 0
    assert "the cluster's models are not in" in caplog.text


@pytest.mark.parametrize(
    ("environ", "cache"),
    [
        ({}, "/home/ada/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/scratch/x"}, "/scratch/x/huggingface/hub"),
        ({"HF_HOME": "/scratch/hf"}, "/scratch/hf/hub"),
        ({"HF_HOME": "/scratch/hf", "HF_HUB_CACHE": "/scratch/c"}, "/scratch/c"),
    ],
)
def test_cache_is_where_huggingface_looks(environ: dict[str, str], cache: str) -> None:
    assert find_cache(environ, Path("/home/ada")) == Path(cache)
