"""Images of profiles that gpuhub does not build."""

from __future__ import annotations

from typing import Any

import docker.errors
import pytest

from gpuhub.common.errors import SetupError
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.images import distribution


class _ImagelessClient:
    """A daemon without images."""

    def inspect_image(self, name: str) -> dict[str, Any]:
        raise docker.errors.ImageNotFound(name)


class _ImagelessDaemons:
    """Two nodes that have no image."""

    async def run(self, node: str, work: Any, *, long: bool = False) -> Any:
        return work(_ImagelessClient())


def build(image: str) -> ClusterSettings:
    return ClusterSettings.model_validate(
        {
            "nodes": [{"name": "rig1", "address": "10.0.0.11", "docker": "unix:///run/docker.sock"}],
            "profiles": [
                {"name": "own", "title": "Own", "image": image},
                {"name": "cpu", "title": "CPU", "gpu_count": 0},
            ],
            "users": {"allowed": ["ada"]},
        }
    )


def test_only_foreign_images_are_listed():
    """gpuhub/notebook is built; an image that only a profile names must be sent."""
    assert distribution.list_foreign_images(build("gpuhub/notebook:latest")) == []
    assert distribution.list_foreign_images(build("lab/mine:1")) == ["lab/mine:1"]


async def test_a_missing_image_is_named():
    """The error has the image, the node that lacks it, and the remedy."""
    with pytest.raises(SetupError, match=r"lab/mine:1, and node rig1 does not have it: build or load it there"):
        await distribution.send_foreign_images(_ImagelessDaemons(), ["lab/mine:1"], "rig1", lambda _step: None)
