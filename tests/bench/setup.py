"""The time from `make up` on a clean machine to the first login page, and the sizes of what is built."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import docker

from gpuhub.common.paths import Paths
from gpuhub.ops.images.image_source import ImageSource
from tests.bench.product import INSTANCE, make


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield the figures of the group `setup`.

    Debian packages and the virtual environment exist already, because `make bench` needs them; images, wheels and nodes
    are made from scratch.
    """
    make("purge")
    begin = time.monotonic()
    make("up")
    yield "setup.seconds", time.monotonic() - begin, "s"
    begin = time.monotonic()
    make("up")
    yield "setup.again_seconds", time.monotonic() - begin, "s"
    socket = Paths(INSTANCE).run / "closet" / "rig1" / "docker.sock"
    with closing(docker.DockerClient(base_url=f"unix://{socket}")) as client:
        for name in ("base", "notebook"):
            yield f"image.{name}_mb", client.images.get(f"gpuhub/{name}:latest").attrs["Size"] / 1e6, "MB"
        yield "image.update_mb", _count_update_bytes(client) / 1e6, "MB"
    begin = time.monotonic()
    make("down")
    yield "setup.down_seconds", time.monotonic() - begin, "s"


def _count_update_bytes(client: docker.DockerClient) -> int:
    """Return what each node is sent after a change of gpu-launch: the notebook image without the layers below it."""
    below = client.images.get("gpuhub/lab:latest").attrs["RootFS"]["Layers"]
    with ImageSource(client.api) as source:
        return sum(len(chunk) for chunk in source.archive("gpuhub/notebook:latest", without=len(below)))
