"""Which images `gpuhub up` sends besides its own, and what it says when one is nowhere."""

from __future__ import annotations

from typing import Any

import docker.errors
import pytest

from gpuhub.errors import SetupError
from gpuhub.images import bring
from gpuhub.settings import Cluster


class _Client:
    """A daemon without images."""

    def inspect_image(self, name: str) -> dict[str, Any]:
        raise docker.errors.ImageNotFound(name)


class _Daemons:
    """Two nodes that have no image."""

    async def run(self, node: str, work: Any, *, long: bool = False) -> Any:
        return work(_Client())


def build(image: str) -> Cluster:
    return Cluster.model_validate(
        {
            "nodes": [{"name": "rig1", "address": "10.0.0.11", "docker": "unix:///run/docker.sock"}],
            "profiles": [
                {"name": "own", "title": "Own", "image": image},
                {"name": "cpu", "title": "CPU", "gpu_count": 0},
            ],
            "users": {"allowed": ["ada"]},
        }
    )


def test_only_profiles_own_images_count():
    """gpuhub/notebook is built; an image that only a profile names has to be sent."""
    assert bring.own_images(build("gpuhub/notebook:latest")) == []
    assert bring.own_images(build("lab/mine:1")) == ["lab/mine:1"]


async def test_an_image_that_is_nowhere_is_named():
    """A profile's image that the building node lacks stops `up` with the image, the node and what to do."""
    with pytest.raises(SetupError, match=r"lab/mine:1, and node rig1 has none .*build or load it there"):
        await bring.send_own(_Daemons(), ["lab/mine:1"], "rig1", lambda _step: None)
