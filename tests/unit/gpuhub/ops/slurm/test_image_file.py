"""Which image file is built, and what the administrator reads of the nodes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from gpuhub.cli import main
from gpuhub.cli.console import AdminConsole
from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.ops.slurm import image_file
from gpuhub.ops.slurm.image_file import NodeImageFile, build_image_file, list_image_files, push_image_file
from gpuhub.ops.slurm.machines import LocalShell, SlurmMachine
from tests.support.paths import FolderPaths
from tests.support.slurm.job_scripts import cluster

NODES = tuple(NodeSettings(name=name, address=f"10.0.0.{number}") for number, name in enumerate(("rig1", "rig2"), 11))


@pytest.fixture
def settings(tmp_path: Path) -> ClusterSettings:
    return cluster(runtime="apptainer", image=str(tmp_path / "notebook.sif"))


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = FolderPaths(folder=tmp_path)
    paths.images.mkdir(parents=True)
    return paths


async def test_image_file_is_built_only_of_another_image(
    settings: ClusterSettings, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, converted = ["one", "one", "two"], []

    async def build(_daemons: object, alone: ClusterSettings, *_: object, **__: object) -> list[SimpleNamespace]:
        assert [node.docker for node in alone.nodes] == ["unix:///var/run/docker.sock"]
        return [SimpleNamespace(name="gpuhub/notebook:abc", id=images.pop(0))]

    def convert(source: str, file: Path, _work: Path) -> None:
        converted.append(source)
        file.write_text(f"image {len(converted)}")

    monkeypatch.setattr(image_file.distribution, "build", build)
    monkeypatch.setattr(image_file, "convert_image", convert)
    monkeypatch.setattr(image_file.shutil, "which", lambda _: "/usr/bin/apptainer")

    async def run() -> str:
        return await build_image_file(settings, paths, Path(), lambda _: None, refresh=False)

    assert settings.slurm.image is not None
    assert (await run()).startswith(f"Built: {settings.slurm.image} (0.0 GB)")
    assert await run() == f"{settings.slurm.image} is current."
    assert (await run()).startswith("Built:")
    # A file that was replaced by hand is not taken for the built one.
    settings.slurm.image.write_text("other")
    images.append("two")
    assert (await run()).startswith("Built:")
    assert converted == ["docker-daemon:gpuhub/notebook:abc"] * 3


async def test_build_needs_apptainer(settings: ClusterSettings, paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_file.shutil, "which", lambda _: None)
    with pytest.raises(SetupError, match="Apptainer is missing on this machine"):
        await build_image_file(settings, paths, Path(), lambda _: None, refresh=False)


def answer(monkeypatch: pytest.MonkeyPatch, results: Sequence[NodeImageFile]) -> None:
    """Have the nodes give these results."""
    known = {result.node: result for result in results}

    @contextmanager
    def open_machines(*_: object, **__: object) -> Iterator[list[SlurmMachine]]:
        head = SlurmMachine(name="head", runner=LocalShell(), is_head=True)
        yield [head, *(SlurmMachine(name=node.name, runner=LocalShell(), node=node) for node in NODES)]

    monkeypatch.setattr(image_file, "open_machines", open_machines)
    for name in ("send_image_file", "read_image_file"):
        monkeypatch.setattr(image_file, name, lambda machine, **_: known[machine.name])


def test_each_node_is_reported(settings: ClusterSettings, paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    output, head = io.StringIO(), LocalShell()
    assert settings.slurm.image is not None
    with pytest.raises(SetupError, match="is missing on this machine: `gpuhub image build` makes it"):
        push_image_file(settings, paths, AdminConsole(output), head, yes=True)
    settings.slurm.image.write_text("image")
    good = NodeImageFile(
        node="rig1", size=1_234_000_000, sha256=image_file.hash_file(settings.slurm.image), version="1.4.5"
    )
    answer(monkeypatch, [good, NodeImageFile(node="rig2", problem="there is no apptainer")])
    with pytest.raises(SetupError, match=r"^users cannot start the image on rig2$"):
        push_image_file(settings, paths, AdminConsole(output), head, yes=True)
    assert output.getvalue() == (
        f"  ✓ rig1: 1.2 GB, {good.sha256[:12]}, runs with Apptainer 1.4.5\n  ✗ rig2: there is no apptainer\n"
    )
    answer(monkeypatch, [good, NodeImageFile(node="rig2", size=1, sha256="0" * 64, version="1.3.0")])
    with pytest.raises(SetupError, match=r"^rig2: another file: `gpuhub image push` replaces it by this machine's$"):
        list_image_files(settings, paths, AdminConsole(output), head)


def test_push_takes_no_names_with_apptainer(
    settings: ClusterSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuhub.cli.images.require_root", lambda _: None)
    monkeypatch.setattr("gpuhub.cli.images.load_settings", lambda *_: settings)
    done = CliRunner().invoke(main.cli, ["image", "push", "mine:1"])
    assert done.exit_code != 0
    assert "takes no name with Apptainer" in str(done.exception) + done.output
