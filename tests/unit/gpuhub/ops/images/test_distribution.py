"""Images of profiles that gpuhub does not build."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest

from gpuhub.common.errors import GpuhubError, NodeUnreachable, NotFound, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import CallKind
from gpuhub.ops.console import StepReport
from gpuhub.ops.images import distribution
from gpuhub.ops.images.builder import BuiltImage
from gpuhub.ops.images.image_source import ImageSource
from tests.support.clusters import build_cluster


class _ImagelessClient:
    """A daemon without images."""

    def inspect_image(self, name: str) -> dict[str, Any]:
        raise docker.errors.ImageNotFound(name)


class _ImagelessDaemons:
    """Two nodes that have no image."""

    nodes: tuple[Any, ...] = ()

    async def run(self, node: str, work: Any, *, kind: CallKind = CallKind.SHORT) -> Any:
        return work(_ImagelessClient())


def build(image: str, *others: str) -> ClusterSettings:
    return ClusterSettings.model_validate(
        {
            "nodes": [{"name": "rig1", "address": "10.0.0.11", "docker": "unix:///run/docker.sock"}],
            "profiles": [
                {"name": "own", "title": "Own", "image": image, "images": list(others)},
                {"name": "cpu", "title": "CPU", "gpu_count": 0},
            ],
            "users": {"allowed": ["ada"]},
        }
    )


def test_only_foreign_images_are_listed():
    """gpuhub/notebook is built; an image that only a profile names must be sent."""
    assert distribution.list_foreign_images(build("gpuhub/notebook:latest")) == []
    assert distribution.list_foreign_images(build("lab/mine:1")) == ["lab/mine:1"]
    assert distribution.list_foreign_images(build("gpuhub/notebook:latest", "lab/mine:1", "gpuhub/llm")) == [
        "lab/mine:1"
    ]


def test_families_are_built_where_a_profile_offers_them():
    """The image for language models is larger, and only some clusters want it."""
    assert distribution.list_families(build("gpuhub/notebook:latest")) == ["gpuhub/notebook"]
    assert distribution.list_families(build("gpuhub/llm")) == ["gpuhub/notebook", "gpuhub/llm"]
    assert distribution.list_families(build("lab/mine:1", "gpuhub/llm:latest")) == ["gpuhub/notebook", "gpuhub/llm"]
    assert distribution.list_families(build("gpuhub/llm:mine")) == ["gpuhub/notebook"]


def test_the_image_of_services_is_built_where_one_uses_it():
    """A service with a preset has that image."""
    mine = {"name": "mine", "image": "lab/mine:1", "port": 80}
    assert distribution.list_families(build_cluster(services=[mine])) == ["gpuhub/notebook"]
    mlflow = {"name": "mlflow", "preset": "mlflow", "data": "/srv/mlflow"}
    assert distribution.list_families(build_cluster(services=[mine, mlflow])) == ["gpuhub/notebook", "gpuhub/services"]


async def test_pushed_images_keep_the_tag_of_their_build(monkeypatch: pytest.MonkeyPatch):
    """By it `gpuhub image gc` finds them when `latest` is another image; others have the tag that was asked for."""
    tags = ["gpuhub/notebook:pinned-abc", "gpuhub/notebook:latest", "gpuhub/notebook:abc123", "lab/copy:1"]
    images = {"gpuhub/notebook": tags, "gpuhub/base:latest": ["gpuhub/base:def456", "gpuhub/base:latest"]}
    client = SimpleNamespace(inspect_image=lambda name: {"RepoTags": images.get(name, [name])})
    daemons = SimpleNamespace(nodes=[SimpleNamespace(name=name) for name in ("rig1", "rig2")])

    async def run(node: str, work: Any, *, kind: CallKind = CallKind.SHORT) -> Any:
        return work(client)

    daemons.run = run
    sent: list[object] = []
    monkeypatch.setattr(distribution, "ensure_sent", lambda names, *_others: sent.append(names))
    monkeypatch.setattr(distribution, "send_image", lambda name, *_others: sent.append(name))
    names = ["gpuhub/notebook", "lab/mine:1", "gpuhub/base:latest", "gpuhub/notebook:old999"]
    await distribution.push(daemons, build("lab/mine:1"), names, lambda _step: None)  # type: ignore[arg-type]
    assert sent == [["gpuhub/notebook:abc123", "gpuhub/base:def456"], "lab/mine:1", "gpuhub/notebook:old999"]


@pytest.mark.parametrize("is_foreign", [False, True])
async def test_a_node_that_refuses_an_image_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, is_foreign: bool):
    """A full disk of one node would otherwise keep the images from all that are slower, at each attempt again."""
    problems = {"rig2": SetupError("rig2: no space left"), "rig4": NodeUnreachable("node rig4: ssh ended")}
    got, has_failed = [], asyncio.Event()
    client = SimpleNamespace(inspect_image=lambda name: {"RepoTags": [name]})
    daemons = SimpleNamespace(nodes=[SimpleNamespace(name=f"rig{number}") for number in range(1, 5)])

    async def run(node: str, work: Any, *, kind: CallKind = CallKind.SHORT) -> Any:
        if kind is CallKind.LONG and node in problems:
            has_failed.set()
            raise problems[node]
        if node == "rig3":
            await has_failed.wait()
            for _ in range(9):
                await asyncio.sleep(0)
        return work(client)

    def send(*arguments: Any) -> None:
        source, node = arguments[1], arguments[3]
        assert not source.is_closed
        got.append(node)

    class Source(ImageSource):
        is_closed = False

        def __exit__(self, *_details: object) -> None:
            self.is_closed = True

    daemons.run = run
    monkeypatch.setattr(distribution, "ImageSource", Source)
    monkeypatch.setattr(distribution, "ensure_sent", send)
    monkeypatch.setattr(distribution, "send_image", send)
    sending: Any = distribution.send_foreign_images if is_foreign else distribution.send_images
    with pytest.raises(GpuhubError, match="rig2: no space left\nnode rig4: ssh ended"):
        await sending(daemons, ["lab/mine:1"], "rig1", lambda _step: None)
    assert got == ["rig3"]
    del problems["rig4"]
    with pytest.raises(SetupError, match=r"^rig2: no space left$"):
        await sending(daemons, ["lab/mine:1"], "rig1", lambda _step: None)


async def test_a_missing_image_is_named():
    """The error has the image, the node that lacks it, and the remedy."""
    with pytest.raises(SetupError, match=r"lab/mine:1, and node rig1 does not have it: build or load it there"):
        await distribution.send_foreign_images(_ImagelessDaemons(), ["lab/mine:1"], "rig1", lambda _step: None)


async def test_an_image_that_is_not_there_is_neither_pushed_nor_pinned():
    """The error names the node that builds, and the command that shows what there is."""
    daemons: Any = _ImagelessDaemons()
    for attempt in (
        distribution.push(daemons, build("lab/mine:1"), ["lab/other:1"], lambda _step: None),
        distribution.pin(daemons, build("lab/mine:1"), "lab/other:1", lambda _step: None),
    ):
        with pytest.raises(NotFound, match=r"rig1, which builds, has no image 'lab/other:1': `gpuhub image list`"):
            await attempt


@pytest.mark.parametrize("is_built", [True, False])
async def test_a_refresh_counts_only_when_its_images_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_built: bool
) -> None:
    """After a failed download, the next start uses the images that exist instead of trying again."""
    asked: list[str] = []

    def build_images(*_arguments: Any, refreshed: str, families: list[str]) -> list[BuiltImage]:
        asked.append(refreshed)
        if not is_built:
            raise SetupError("no network")
        return [BuiltImage(name="gpuhub/base:1", id="sha256:1", size=1)]

    monkeypatch.setattr(distribution, "build_images", build_images)
    monkeypatch.setattr(distribution, "read_sources", lambda _root: None)
    monkeypatch.setattr(distribution, "ensure_lab_assets", lambda *_arguments: None)
    monkeypatch.setattr(Paths, "images", tmp_path / "not made yet")
    start = partial(
        distribution.ensure_images,
        _ImagelessDaemons(),
        build("gpuhub/notebook:latest"),
        Paths("ghtest"),
        tmp_path,
        StepReport(),
    )
    with nullcontext() if is_built else pytest.raises(SetupError, match="no network"):
        await start(refresh=True)
    with nullcontext() if is_built else pytest.raises(SetupError, match="no network"):
        await start()
    assert asked[0] != ""
    assert asked[1] == (asked[0] if is_built else "")
