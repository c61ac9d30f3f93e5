"""The plan of a build: its source files, and tags that are hashes of everything that goes into an image."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.config.containers.images import ImageSettings

_IGNORED = {
    "__pycache__",
    ".ipynb_checkpoints",
    "build",
    "dist",
    "node_modules",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
}
#: What a build of the JupyterLab extension has written next to its sources.
_BUILT_EXTENSION = "labextension/"
#: Suffixes of a package's source files; other files in the tree do not change an image.
_EXTENSION_SUFFIXES = {".py", ".toml", ".typed", ".html", ".js", ".css", ".json", ".md", ".sh", ".template", ".yaml"}

BASE = "gpuhub/base"
TORCH = "gpuhub/torch"
SCIENCE = "gpuhub/science"
LAB = "gpuhub/lab"
LLM_PACKAGES = "gpuhub/llm-packages"
NOTEBOOK = "gpuhub/notebook"
LLM = "gpuhub/llm"
SERVICES = "gpuhub/services"
#: Each image with the one below it, in an order in which they can be built.
PARENTS = {
    TORCH: BASE,
    SCIENCE: TORCH,
    LAB: SCIENCE,
    LLM_PACKAGES: LAB,
    NOTEBOOK: LAB,
    LLM: LLM_PACKAGES,
    SERVICES: SCIENCE,
}
#: Images with the packages of a lock file, and its name in images/python without `.lock`.
LOCKS = {SCIENCE: "science", LAB: "lab", LLM_PACKAGES: "llm", SERVICES: "services"}
#: Images that users work in: gpu-launch and its settings on top of packages.
FAMILIES = (NOTEBOOK, LLM)
#: Recipes in images/python: of gpuhub/torch, of images with a lock's packages, and a program that both run.
TORCH_RECIPE = "torch.Dockerfile"
PACKAGES_RECIPE = "packages.Dockerfile"
TIDY = "tidy.py"

#: Must be increased when the code that makes the base image's file system changes its result.
_BASE_RECIPE = 3

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
    #: extensions, without the next: the gpu-launch distribution.
    extensions: SourceFiles
    #: extensions/gpuhub_lab: the JupyterLab extension.
    lab: SourceFiles
    #: notebooks: the examples.
    notebooks: SourceFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """Tags of all images by their names, and the keys of the wheels of those that hold packages."""

    tags: Mapping[str, str]
    wheels: Mapping[str, str]
    #: The key of the JupyterLab extension's wheel.
    lab: str

    def tagged(self, image: str) -> str:
        """Return an image's name with its tag."""
        return f"{image}:{self.tags[image]}"

    def list_missing(self, families: Sequence[str], has: Callable[[str], bool]) -> list[str]:
        """Return the images to build for these families, lowest first.

        An image that is there needs nothing below it. The base is always needed: the GPU agents run it.

        Args:
            has: Whether an image is there, by its name with the tag.
        """
        missing = set() if has(self.tagged(BASE)) else {BASE}
        for family in families:
            image = family
            while image not in missing and not has(self.tagged(image)):
                missing.add(image)
                image = PARENTS[image]
        return [image for image in (BASE, *PARENTS) if image in missing]


def build_plan(sources: ImageSources, settings: ImageSettings, machine: str, *, refreshed: str = "") -> ImagePlan:
    """Build the plan for a machine type such as `x86_64`.

    Args:
        refreshed: When the administrator last asked for Debian's current packages; empty for never.
    """
    python = sources.python
    driver = [line.split()[0] for line in read_lock(sources, SCIENCE).splitlines() if line.startswith("nvidia-ml-py==")]
    wheels = {image: hash_parts(machine, read_lock(sources, image)) for image in LOCKS}
    wheels[TORCH] = hash_parts(machine, settings.torch, settings.torch_build, settings.torch_index)
    user_layer = (sources.notebook, sources.extensions, sources.lab, sources.notebooks)
    recipes: dict[str, tuple[object, ...]] = {
        TORCH: (wheels[TORCH], _hash_files(python, TORCH_RECIPE, TIDY)),
        **{image: (wheels[image], _hash_files(python, PACKAGES_RECIPE, TIDY)) for image in LOCKS},
        **dict.fromkeys(FAMILIES, user_layer),
    }
    tags = {BASE: hash_parts(_BASE_RECIPE, settings.debian_suite, machine, driver, sources.base, refreshed)}
    for image, parent in PARENTS.items():
        tags[image] = hash_parts(tags[parent], *recipes[image])
    return ImagePlan(tags=tags, wheels=wheels, lab=hash_parts(sources.lab))


def read_lock(sources: ImageSources, image: str) -> str:
    """Return the lock file of an image that has one."""
    return sources.python[f"{LOCKS[image]}.lock"].decode()


def list_locked_names(lock: str) -> set[str]:
    """Return the names of the packages in a lock file."""
    return {line.partition("==")[0] for line in lock.splitlines() if "==" in line}


def _hash_files(files: SourceFiles, *names: str) -> str:
    return hash_parts({name: files[name] for name in names})


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
    extensions, lab = read_tree(root / "extensions"), read_tree(root / "extensions/gpuhub_lab")
    notebooks = read_tree(root / "notebooks")
    return ImageSources(
        base=read_tree(root / "images/base"),
        python=read_tree(root / "images/python"),
        notebook=read_tree(root / "images/notebook"),
        extensions={
            name: data
            for name, data in extensions.items()
            if Path(name).suffix in _EXTENSION_SUFFIXES and not name.startswith("gpuhub_lab/")
        },
        lab={name: data for name, data in lab.items() if not name.startswith(_BUILT_EXTENSION)},
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
