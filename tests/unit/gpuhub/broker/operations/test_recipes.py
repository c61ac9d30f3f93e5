"""The lab's recipes at the broker: which files are handed out, within which bounds."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from gpuhub.broker.operations.recipes import MAX_BYTES, MAX_FILES, RecipeOperations
from gpuhub.config.containers.jobs import JobSettings
from tests.support.broker.calls import read
from tests.support.broker.in_process import Setting, asgi_broker
from tests.support.docker.simulated_nodes import build_cluster


async def test_new_files_are_handed_out_at_once(tmp_path: Path) -> None:
    recipes = RecipeOperations(tmp_path)
    assert await recipes.list_recipes() == []
    for name in ("train", "a-2"):
        (tmp_path / f"{name}.yaml").write_text(f"run: {name}")
    (tmp_path / "README.md").write_text("no recipe")
    assert [(view.name, view.text) for view in await recipes.list_recipes()] == [
        ("a-2", "run: a-2"),
        ("train", "run: train"),
    ]


async def test_other_files_are_left_out_and_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Links, pipes, folders, files that others may write, large ones, other names and encodings."""
    (tmp_path / "good.yaml").write_text("run: x")
    (tmp_path / "link.yaml").symlink_to("/etc/shadow")
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "open.yaml").write_text("run: x")
    (tmp_path / "open.yaml").chmod(0o666)
    (tmp_path / "large.yaml").write_text("#" * (MAX_BYTES + 1))
    (tmp_path / "Upper.yaml").write_text("run: x")
    (tmp_path / "short.yml").write_text("run: x")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff")
    recipes = RecipeOperations(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [view.name for view in await recipes.list_recipes()] == ["good"]
    names = (
        "link.yaml",
        "pipe.yaml",
        "folder.yaml",
        "open.yaml",
        "large.yaml",
        "Upper.yaml",
        "short.yml",
        "bytes.yaml",
    )
    assert {name for name in names if sum(name in record.message for record in caplog.records) == 1} == set(names)


async def test_number_is_bounded_and_a_missing_folder_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(MAX_FILES + 3):
        (tmp_path / f"r{number}.yaml").write_text("run: x")
    assert len(await RecipeOperations(tmp_path).list_recipes()) == MAX_FILES
    assert await RecipeOperations(tmp_path / "none").list_recipes() == []
    assert "No such file or directory" in caplog.text
    assert await RecipeOperations(None).list_recipes() == []


async def test_users_get_them_from_the_broker(tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "train.yaml").write_text("run: train")
    cluster = build_cluster().model_copy(update={"jobs": JobSettings(recipes=folder)})
    async with asgi_broker(Setting(tmp_path, cluster)) as running:
        answer = await read(running, "ada", "/recipes")
    assert answer == [{"name": "train", "text": "run: train"}]


@pytest.mark.parametrize("value", ["recipes", "/a/../b", "/a\n", ""])
def test_folder_is_an_absolute_path(value: str) -> None:
    with pytest.raises(ValueError, match="the absolute path of a folder on the head node is needed"):
        JobSettings.model_validate({"recipes": value})
