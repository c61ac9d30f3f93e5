"""From `make up` on a machine that has nothing to the first login page; sizes of what was built."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import docker

from gpuhub.paths import Paths
from tests.bench.product import INSTANCE, make


def measure() -> Iterator[tuple[str, float, str]]:
    """Figures of the group `setup`.

    Debian packages and the virtual environment are there already (`make bench` itself needs them); images, wheels and
    nodes are made from nothing.
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
    begin = time.monotonic()
    make("down")
    yield "setup.down_seconds", time.monotonic() - begin, "s"
