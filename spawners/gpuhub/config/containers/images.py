"""`[images]` in cluster.toml: what the images are made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import StringConstraints

from gpuhub.config.base import (
    SettingsTable,
)


class ImageSettings(SettingsTable):
    """Versions and sources from which the container images are built."""

    #: Debian release that the images are based on.
    debian_suite: Annotated[str, StringConstraints(pattern=r"^[a-z]+$")] = "bookworm"
    #: Version of PyTorch in the images.
    torch: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+\.\d+$")] = "2.13.0"
    #: `auto`: the build that pip finds; `cpu` or `cuda`: that build, and an error where pip finds the other.
    torch_build: Literal["auto", "cpu", "cuda"] = "auto"
    #: URL of another package index for the CPU build of torch; None: pip's default index.
    torch_index: str | None = None
