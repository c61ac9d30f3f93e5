"""Models by path, by the names of the cluster's folder, and by those of the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_launch.errors import UsageError
from gpu_launch.serving import model_names
from tests.support.launch.model_folders import write_folder

COMMITS = ("a" * 40, "b" * 40)


def add_snapshot(cache: Path, name: str, commit: str, *, ref: str | None = None) -> Path:
    """Add a revision to a cache in Hugging Face's format."""
    model = cache / f"models--{name.replace('/', '--')}"
    if ref is not None:
        (model / "refs").mkdir(parents=True, exist_ok=True)
        (model / "refs" / "main").write_text(ref)
    return write_folder(model / "snapshots" / commit)


def find(tmp_path, model, *, shared=None):
    environ = {} if shared is None else {"GPUHUB_MODELS": str(shared)}
    return model_names.find_folder(model, cwd=tmp_path, environ=environ, home=tmp_path / "home")


def test_folder_is_found_before_a_name(tmp_path):
    folder = write_folder(tmp_path / "own" / "Tiny")
    assert find(tmp_path, "own/Tiny") == folder
    assert find(tmp_path, str(folder)) == folder


def test_name_is_found_in_the_cluster_and_in_the_cache(tmp_path):
    """The cluster's copy first; the revision of `main`, else the only one."""
    cache, shared = tmp_path / "home" / ".cache" / "huggingface" / "hub", tmp_path / "models"
    own = add_snapshot(cache, "lab/Tiny", COMMITS[0], ref=COMMITS[1])
    assert find(tmp_path, "lab/Tiny") == own
    main = add_snapshot(cache, "lab/Tiny", COMMITS[1])
    assert find(tmp_path, "lab/Tiny") == main
    theirs = add_snapshot(shared / "hub", "lab/Tiny", COMMITS[0])
    assert find(tmp_path, "lab/Tiny", shared=shared) == theirs
    plain = write_folder(shared / "Plain")
    assert find(tmp_path, "Plain", shared=shared) == plain


@pytest.mark.parametrize("ref", [COMMITS[0], "../../../etc", None])
def test_two_revisions_without_a_main_are_no_model(tmp_path, ref):
    """A name of a revision that is not there, or is none, is not followed."""
    cache = tmp_path / "home" / ".cache" / "huggingface" / "hub"
    for commit in ("c" * 40, "d" * 40):
        add_snapshot(cache, "lab/Tiny", commit, ref=ref)
    with pytest.raises(UsageError, match="no model of that name"):
        find(tmp_path, "lab/Tiny")


def test_missing_model_names_those_that_there_are(tmp_path):
    add_snapshot(tmp_path / "home" / ".cache" / "huggingface" / "hub", "lab/Tiny", COMMITS[0])
    with pytest.raises(UsageError, match=r"Models by name here: lab/Tiny. Download one with: hf download lab/Large"):
        find(tmp_path, "lab/Large")
    for nothing in ("", " ", "a\0b"):
        with pytest.raises(UsageError, match="a model's name, is needed"):
            find(tmp_path, nothing)


def test_other_nodes_have_home_datasets_and_models_alone(tmp_path):
    """Also through a link."""
    home, models = tmp_path / "home", tmp_path / "models"
    inside, shared, outside = (write_folder(root / "Tiny") for root in (home, models, tmp_path / "scratch"))
    (home / "link").symlink_to(outside)
    environ = {"GPUHUB_MODELS": str(models)}
    for folder in (inside, shared):
        model_names.check_shared(folder, environ=environ, home=home)
    for folder in (outside, home / "link"):
        with pytest.raises(UsageError, match=r"is not on other nodes. Use a folder in"):
            model_names.check_shared(folder, environ=environ, home=home)
    with pytest.raises(UsageError, match="is not on other nodes"):
        model_names.check_shared(shared, environ={}, home=home)
