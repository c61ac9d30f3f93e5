"""The plan of a build: its source files, and tags that are hashes of everything that goes into an image."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.config.images import ImageSettings

_IGNORED = {"__pycache__", ".ipynb_checkpoints", "build", "dist", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
#: Suffixes of a package's source files; other files in the tree do not change an image.
_EXTENSION_SUFFIXES = {".py", ".toml", ".typed", ".html", ".js", ".css", ".json", ".md", ".sh", ".template"}

BASE = "gpuhub/base"
PYTHON = "gpuhub/python"
NOTEBOOK = "gpuhub/notebook"

#: Must be increased when the code that makes the base image's file system changes its result.
_BASE_RECIPE = 2

#: Path of a source file below its root → content.
SourceFiles = Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSources:
    """The files from which images are built, by their paths below each folder."""

    #: images/base
    base: SourceFiles
    #: images/python
    python: SourceFiles
    #: images/notebook
    notebook: SourceFiles
    #: extensions: the gpu-launch distribution.
    extensions: SourceFiles
    #: notebooks: the examples.
    notebooks: SourceFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """Tags of the three images, and the key of the wheels for the Python image."""

    base: str
    python: str
    notebook: str
    wheels: str

    @property
    def node_images(self) -> tuple[str, str]:
        """The names of the images that every node needs: for notebooks and workers, and for the GPU agent."""
        return f"{NOTEBOOK}:{self.notebook}", f"{BASE}:{self.base}"


def build_plan(sources: ImageSources, settings: ImageSettings, machine: str, *, refreshed: str = "") -> ImagePlan:
    """Build the plan for a machine type such as `x86_64`.

    Args:
        refreshed: When the administrator last asked for Debian's current packages; empty for never.
    """
    torch = [settings.torch, settings.torch_build, settings.torch_index, machine]
    lock = sources.python["requirements.lock"].decode()
    wheels = hash_parts(lock, torch)
    driver = [line.split()[0] for line in lock.splitlines() if line.startswith("nvidia-ml-py==")]
    base = hash_parts(_BASE_RECIPE, settings.debian_suite, machine, driver, sources.base, refreshed)
    python = hash_parts(base, wheels, sources.python)
    return ImagePlan(
        base=base,
        python=python,
        notebook=hash_parts(python, sources.notebook, sources.extensions, sources.notebooks),
        wheels=wheels,
    )


def hash_parts(*parts: object) -> str:
    """Return twelve hexadecimal digits of a hash of the parts; the order of a mapping does not matter."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Mapping):
            content = {name: hashlib.sha256(data).hexdigest() for name, data in part.items()}
            total.update(json.dumps(content, sort_keys=True).encode())
        else:
            total.update(json.dumps(part).encode())
        total.update(b"\n")
    return total.hexdigest()[:12]


def parse_packages(text: str) -> list[str]:
    """Parse package names from a file with one on each line and `#` comments."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def read_sources(root: Path) -> ImageSources:
    """Read `images/`, `extensions/` and `notebooks/` below the root of a clone.

    Raises:
        SetupError: This is not a clone of gpuhub.
    """
    if not (root / "images/base/packages").exists() or not (root / "extensions/pyproject.toml").exists():
        raise SetupError(f"{root}: images/ and extensions/ of gpuhub's source tree are needed to build images")
    python = read_tree(root / "images/python")
    # The lock alone decides what is installed.
    del python["requirements.in"]
    extensions = read_tree(root / "extensions")
    notebooks = read_tree(root / "notebooks")
    return ImageSources(
        base=read_tree(root / "images/base"),
        python=python,
        notebook=read_tree(root / "images/notebook"),
        extensions={name: data for name, data in extensions.items() if Path(name).suffix in _EXTENSION_SUFFIXES},
        notebooks={name: data for name, data in notebooks.items() if Path(name).suffix == ".ipynb"},
    )


def read_tree(folder: Path) -> dict[str, bytes]:
    """Read every file below a folder by its relative path, without caches and build outputs."""
    files: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part in _IGNORED or part.endswith(".egg-info") for part in parts):
            files["/".join(parts)] = path.read_bytes()
    return files
