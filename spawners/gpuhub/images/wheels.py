"""The wheelhouse: every Python package of the images, downloaded on the head node with its own pip settings.

Images are then built without a network, so a build can be repeated, and works where only the head node has a way out.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from gpuhub.errors import SetupError
from gpuhub.images.commands import run_shown
from gpuhub.images.progress import Report, Step
from gpuhub.tables import Images

#: Python and C library of Debian bookworm: what wheels must fit, whatever the head node itself has.
_PYTHON = "3.11"
_GLIBC_MINORS = range(5, 37)
#: The CUDA build of torch is some 3 GB with its libraries.
_DEADLINE_S = 2 * 3600.0
_LABEL = "Python packages"


def ensure_wheels(folder: Path, *, key: str, lock: bytes, settings: Images, machine: str, report: Report) -> Path:
    """The folder with the wheels for a key of the plan; downloaded when missing, other keys' wheels are removed.

    Raises:
        SetupError: pip is missing or failed, or found the other build of torch than wanted.
    """
    wheels = folder / key
    if not wheels.exists():
        partial = folder / f"{key}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        lock_file = partial / "requirements.lock"
        lock_file.write_bytes(lock)
        for command in build_downloads(find_pip(), lock_file, settings, machine):
            run_shown(command, label=_LABEL, report=report, deadline_s=_DEADLINE_S)
        lock_file.unlink()
        check_torch(partial, settings)
        partial.rename(wheels)
        size = sum(wheel.stat().st_size for wheel in wheels.iterdir())
        report(Step(label=_LABEL, done=size, text="downloaded", is_finished=True))
    for other in folder.iterdir():
        if other != wheels:
            shutil.rmtree(other)
    return wheels


def find_pip() -> list[str]:
    """The command for pip: this environment's, or the system's."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    system = shutil.which("pip3")
    if system is None:
        raise SetupError("pip is needed to download the images' packages: install python3-pip")
    return [system]


def build_downloads(pip: Sequence[str], lock: Path, settings: Images, machine: str) -> list[list[str]]:
    """The commands that download beside the lock: what it names, then torch with NVIDIA's libraries.

    The lock also pins what torch needs besides those.
    """
    index = ["--extra-index-url", settings.torch_index] if settings.torch_index else []
    download = [*pip, "download", "--progress-bar", "off", "--dest", str(lock.parent), *build_fitting(machine)]
    return [
        [*download, "--no-deps", "--requirement", str(lock)],
        [*download, *index, "--constraint", str(lock), f"torch=={settings.torch}"],
    ]


def build_fitting(machine: str) -> list[str]:
    """pip's options for wheels that fit the images' Python, whatever Python pip itself runs in."""
    fitting = ["--only-binary=:all:", "--python-version", _PYTHON, "--implementation", "cp"]
    for abi in ("cp311", "abi3", "none"):
        fitting += ["--abi", abi]
    for platform in build_platforms(machine):
        fitting += ["--platform", platform]
    return fitting


def build_platforms(machine: str) -> list[str]:
    """pip's names for Linux machines of a type whose C library is not newer than bookworm's.

    pip takes an explicit platform literally, so every older one is named as well.
    """
    names = [f"manylinux_2_{minor}_{machine}" for minor in reversed(_GLIBC_MINORS)]
    return [*names, f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}", f"linux_{machine}"]


def check_torch(wheels: Path, settings: Images) -> None:
    """Refuse a torch of the other build than the settings want."""
    (wheel,) = wheels.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = torch_build(archive.read("torch/version.py").decode())
    if settings.torch_build in ("auto", found):
        return
    raise SetupError(
        f"images.torch_build is {settings.torch_build!r}, but pip found the {found} build of torch {settings.torch} "
        f"({wheel.name}): set images.torch_index to the package index of the {settings.torch_build} build, "
        "which pytorch.org/get-started shows"
    )


def torch_build(version_module: str) -> str:
    """`cuda` or `cpu` from the text of torch/version.py, where a CUDA build has `cuda: Optional[str] = '12.8'`."""
    return "cuda" if re.search(r"^cuda\b[^=\n]*= *['\"]", version_module, re.MULTILINE) else "cpu"


def read_module(wheels: Path, distribution: str, name: str) -> bytes:
    """A file from the one wheel of a distribution, such as `pynvml.py` of `nvidia_ml_py`."""
    (wheel,) = wheels.glob(f"{distribution}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name)
