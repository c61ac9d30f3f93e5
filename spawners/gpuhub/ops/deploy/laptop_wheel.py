"""The wheel of gpu-launch that the hub serves, so that a laptop installs the version that its hub runs."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from gpuhub.ops.images.progress import ProgressCallback, run_with_progress
from gpuhub.ops.images.wheels import find_pip

_DEADLINE_S = 300.0
_LABEL = "gpu-launch for laptops"
_DIGEST = "sources.sha256"


def ensure_wheel(source: Path, folder: Path, report: ProgressCallback) -> Path:
    """Build the wheel into `folder` unless the one there is of the same sources, and return it.

    Args:
        source: The clone; its `extensions/` is the distribution.
        folder: Holds the one wheel and the digest of its sources; anything else in it is removed.
        report: Gets pip's progress.

    Raises:
        SetupError: pip failed; its last lines are in the text.
    """
    distribution = source / "extensions"
    digest = _hash_sources(distribution)
    wheels = sorted(folder.glob("gpu_launch-*.whl"))
    if len(wheels) == 1 and _read(folder / _DIGEST) == digest:
        return wheels[0]
    shutil.rmtree(folder, ignore_errors=True)
    # The hub serves the folder's wheel to anyone: it holds no secret.
    folder.mkdir(parents=True, mode=0o755)
    # A copy: setuptools writes into the tree that it builds.
    copy = folder / "build"
    shutil.copytree(distribution, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    command = [*find_pip(), "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(copy)]
    run_with_progress(command, label=_LABEL, report=report, deadline_s=_DEADLINE_S)
    shutil.rmtree(copy)
    (folder / _DIGEST).write_text(digest, encoding="utf-8")
    (wheel,) = folder.glob("gpu_launch-*.whl")
    return wheel


def _hash_sources(distribution: Path) -> str:
    total = hashlib.sha256()
    for file in sorted([distribution / "pyproject.toml", *distribution.joinpath("gpu_launch").rglob("*.py")]):
        total.update(f"{file.relative_to(distribution)}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
