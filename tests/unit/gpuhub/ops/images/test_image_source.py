"""Archives of images without the layers that another daemon has."""

from __future__ import annotations

import io
import json
import tarfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gpuhub.ops.images.image_source import ImageSource, count_known_layers

#: As Docker 20.10 saves an image of four layers, of which the last is equal to the second.
LAYERS = {"a/layer.tar": b"debian" * 400, "b/layer.tar": b"torch" * 900, "c/layer.tar": b"lab", "d/layer.tar": None}


def pack() -> bytes:
    """Return the archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in LAYERS.items():
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "../b/layer.tar"
            else:
                info.size = len(content)
                # A time with a fraction has a header of its own before the file.
                info.mtime = 1.5
            archive.addfile(info, io.BytesIO(content or b""))
        manifest = json.dumps([{"Config": "x.json", "Layers": list(LAYERS)}]).encode()
        for name, content in (("x.json", b"{}"), ("manifest.json", manifest)):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


class Daemon:
    """A daemon that has this one image."""

    def __init__(self) -> None:
        self.saved = 0

    def get_image(self, name: str, chunk_size: int) -> Any:
        self.saved += 1
        text = pack()
        return iter([text[:1000], text[1000:]])


def read(chunks: Any) -> dict[str, bytes | None]:
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks)), mode="r:") as archive:
        found = {info.name: archive.extractfile(info) if info.isfile() else None for info in archive.getmembers()}
        return {name: file and file.read() for name, file in found.items()}


@pytest.mark.parametrize(
    ("without", "left_out"),
    [
        (0, []),
        (1, ["a/layer.tar"]),
        (2, ["a/layer.tar"]),
        (3, ["a/layer.tar", "c/layer.tar"]),
        (4, ["a/layer.tar", "b/layer.tar", "c/layer.tar", "d/layer.tar"]),
    ],
)
def test_archive_lacks_only_layers_that_nothing_needs(without: int, left_out: list[str]) -> None:
    """A layer that a later one is a link to stays as long as the later one does."""
    whole = read([pack()])
    with ImageSource(Daemon()) as source:
        assert read(source.archive("x", without)) == {k: v for k, v in whole.items() if k not in left_out}


def test_image_is_saved_once_for_all_nodes() -> None:
    """Several nodes read it at the same time."""
    daemon = Daemon()
    with ImageSource(daemon) as source, ThreadPoolExecutor(8) as pool:
        archives = list(pool.map(lambda _: read(source.archive("x", 1)), range(16)))
    assert daemon.saved == 1
    assert all(archive == archives[0] for archive in archives)


class Target:
    """A daemon with two other images, which share one and three layers with the wanted one."""

    def __init__(self, storage: str = "overlay2") -> None:
        self.storage = storage

    def info(self) -> dict[str, Any]:
        return {"DriverStatus": [["driver-type", self.storage]]}

    def images(self) -> list[dict[str, str]]:
        return [{"Id": "one"}, {"Id": "three"}, {"Id": "none"}]

    def inspect_image(self, name: str) -> dict[str, Any]:
        return {"RootFS": {"Layers": {"one": ["1", "x"], "three": ["1", "2", "3"], "none": None}[name]}}


def test_known_layers_are_those_of_the_nearest_image() -> None:
    """Layers count from the lowest; containerd's image store needs all of them."""
    image = {"RootFS": {"Layers": ["1", "2", "3", "4"]}}
    assert count_known_layers(image, Target()) == 3
    assert count_known_layers({"RootFS": {}}, Target()) == 0
    assert count_known_layers(image, Target("io.containerd.snapshotter.v1")) == 0
