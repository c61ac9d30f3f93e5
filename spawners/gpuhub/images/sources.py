"""Reads the source tree that images are built from."""

from __future__ import annotations

from pathlib import Path

from gpuhub.errors import SetupError
from gpuhub.images.plan import Sources

_LEFT_OUT = {"__pycache__", ".ipynb_checkpoints", "build", "dist", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
#: What a package's own sources are made of; a stray file in the tree then changes no image.
_EXTENSION_SUFFIXES = {".py", ".toml", ".typed", ".html", ".js", ".css", ".json", ".md", ".sh", ".template"}


def read_sources(root: Path) -> Sources:
    """Read `images/`, `extensions/` and `notebooks/` below the root of a clone.

    Raises:
        SetupError: this is not a clone of gpuhub.
    """
    if not (root / "images/base/packages").exists() or not (root / "extensions/pyproject.toml").exists():
        raise SetupError(f"{root}: images/ and extensions/ of gpuhub's source tree are needed to build images")
    python = read_tree(root / "images/python")
    # The lock alone decides what is installed.
    del python["requirements.in"]
    extensions = read_tree(root / "extensions")
    notebooks = read_tree(root / "notebooks")
    return Sources(
        base=read_tree(root / "images/base"),
        python=python,
        notebook=read_tree(root / "images/notebook"),
        extensions={name: data for name, data in extensions.items() if Path(name).suffix in _EXTENSION_SUFFIXES},
        notebooks={name: data for name, data in notebooks.items() if Path(name).suffix == ".ipynb"},
    )


def read_tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its path relative to it, without caches and build leftovers."""
    files: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part in _LEFT_OUT or part.endswith(".egg-info") for part in parts):
            files["/".join(parts)] = path.read_bytes()
    return files
