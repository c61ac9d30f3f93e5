"""Images on the nodes: which are shown, and which nothing needs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest

from gpuhub.cli.tables import format_images
from gpuhub.common.errors import NodeUnreachable
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import CallKind
from gpuhub.ops.images import inventory
from gpuhub.ops.images.inventory import NodeImage

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)


def _cluster(*images: str) -> ClusterSettings:
    """Two nodes, of which rig1 builds, and a profile that offers these images."""
    return ClusterSettings.model_validate(
        {
            "nodes": [
                {"name": "rig1", "address": "10.0.0.11", "docker": "unix:///run/docker.sock"},
                {"name": "rig2", "address": "10.0.0.12", "docker": "ssh://root@10.0.0.12"},
            ],
            "profiles": [{"name": "cpu", "title": "CPU", "gpu_count": 0, "images": list(images)}],
            "users": {"allowed": ["ada"]},
        }
    )


def _image(*names: str, node: str = "rig1", age_h: int = 1, containers: int = 0) -> NodeImage:
    return NodeImage(
        node=node,
        id=f"sha256:{names[0]}",
        names=names,
        size=1_800_000_000,
        made_at=NOW - timedelta(hours=age_h),
        containers=containers,
    )


class _Client:
    """A daemon as docker-py answers for it: images, containers and the disk."""

    def __init__(self, images: Sequence[tuple[str, list[str] | None]] = (), used: Sequence[str] = ()) -> None:
        self.listed, self.used = images, used
        self.removed: list[str] = []

    def containers(self, *, all: bool) -> list[dict[str, Any]]:
        assert all
        return [{"Id": "c", "ImageID": image} for image in self.used]

    def images(self) -> list[dict[str, Any]]:
        return [{"Id": id_, "RepoTags": tags, "Size": 5, "Created": 1_790_000_000} for id_, tags in self.listed]

    def df(self) -> dict[str, Any]:
        return {"LayersSize": 1000 - 100 * len(self.removed)}

    def remove_image(self, name: str) -> None:
        if "used" in name or "gone" in name:
            response = SimpleNamespace(status_code=409 if "used" in name else 404, reason="", url="")
            raise docker.errors.APIError("no", response=response)
        self.removed.append(name)


class _Daemons:
    """Clients of nodes; a node without one does not answer."""

    def __init__(self, **clients: _Client) -> None:
        self.clients = clients

    async def run(self, node: str, work: Any, *, kind: CallKind = CallKind.SHORT) -> Any:
        if node not in self.clients:
            raise NodeUnreachable(f"{node} does not answer")
        return work(self.clients[node])


async def test_images_are_read_with_what_uses_them() -> None:
    """Those of gpuhub and of profiles; others of the node are nobody's business here."""
    client = _Client(
        [("a", ["gpuhub/notebook:1", "gpuhub/notebook:latest", "x:1"]), ("b", None), ("c", ["lab/mine:latest"]), ("d", ["x:2"])],
        used=["a", "a", "d"],
    )  # fmt: skip
    images, problems = await inventory.read_images(_Daemons(rig1=client), _cluster("lab/mine"))
    assert [(image.id, image.names, image.containers) for image in images] == [
        ("a", ("gpuhub/notebook:1", "gpuhub/notebook:latest"), 2),
        ("c", ("lab/mine:latest",), 0),
    ]
    assert problems == {"rig2": "rig2 does not answer"}


@pytest.mark.parametrize(
    ("image", "offered", "is_unused"),
    [
        (_image("gpuhub/notebook:new", "gpuhub/notebook:latest"), (), False),
        (_image("gpuhub/notebook:old"), (), True),
        (_image("gpuhub/notebook:old", containers=1), (), False),
        (_image("gpuhub/notebook:old", "gpuhub/notebook:pinned-0123456789ab"), (), False),
        (_image("gpuhub/notebook:old"), ("gpuhub/notebook:old",), False),
        (_image("gpuhub/base:latest", node="rig2"), (), False),
        (_image("gpuhub/torch:latest"), (), False),
        (_image("gpuhub/torch:latest", node="rig2"), (), True),
        (_image("gpuhub/llm:latest"), (), True),
        (_image("gpuhub/llm:latest"), ("gpuhub/llm",), False),
        (_image("gpuhub/llm-packages:latest"), ("gpuhub/llm:latest",), False),
        (_image("gpuhub/llm-packages:latest"), (), True),
        (_image("lab/mine:1"), ("lab/mine:1",), False),
    ],
)
def test_images_that_nothing_needs(image: NodeImage, offered: tuple[str, ...], is_unused: bool) -> None:
    """Not current, in no profile, and without a container; the node that builds keeps the layers for the next build."""
    assert inventory.find_unused([image], _cluster(*offered)) == ([image] if is_unused else [])


async def test_an_image_that_has_come_into_use_stays() -> None:
    """Docker refuses to remove it; one that is gone already is no error. The newest is removed first."""
    client = _Client()
    images = [_image("a:1", age_h=9), _image("b:used"), _image("c:gone"), _image("d:1", "d:2", age_h=2)]
    assert await inventory.remove_images(_Daemons(rig1=client), images) == {"rig1": 300}
    assert client.removed == ["d:1", "d:2", "a:1"]


async def test_other_refusals_of_docker_are_reported() -> None:
    """Such as a disk that cannot be written."""
    client = _Client()
    client.remove_image = _refuse  # type: ignore[method-assign]
    with pytest.raises(docker.errors.APIError):
        await inventory.remove_images(_Daemons(rig1=client), [_image("a:1")])


def _refuse(_name: str) -> None:
    raise docker.errors.APIError("no", response=SimpleNamespace(status_code=500, reason="", url=""))


def test_images_are_shown_with_their_nodes() -> None:
    """One line for each image, the newest first; the same name with another id is another image."""
    images = [
        _image("gpuhub/base:1", age_h=50),
        _image("gpuhub/notebook:1", containers=2),
        _image("gpuhub/notebook:1", node="rig2", containers=1),
    ]
    assert format_images(images, NOW, None).splitlines() == [
        "IMAGE              SIZE    AGE      NODES       CONTAINERS",
        "gpuhub/notebook:1  1.8 GB  1 h      rig1, rig2  3",
        "gpuhub/base:1      1.8 GB  2 d 2 h  rig1        0",
    ]
