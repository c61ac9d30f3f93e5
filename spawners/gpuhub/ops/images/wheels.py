"""The wheels of all Python packages in the images and of the JupyterLab extension, and that of gpu-launch for laptops.

pip downloads the packages on the head node with its settings there. Images are built from them without a network, so a
build can be repeated, and only the head node needs internet access. A laptop installs the version that its hub runs.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.config.containers.images import ImageSettings
from gpuhub.ops.images.build_plan import hash_parts, read_tree
from gpuhub.ops.images.progress import ProgressCallback, ProgressStep, run_with_progress

#: Python and C library of Debian bookworm, which the wheels must fit; the head node may have others.
_PYTHON = "3.11"
_GLIBC_MINORS = range(5, 37)
#: Maximum duration of the download, seconds: the CUDA build of torch has some 3 GB with its libraries.
_DEADLINE_S = 2 * 3600.0
_LABEL = "Python packages"
#: Name of the wheels of torch.
TORCH_WHEELS = "torch"
#: Maximum duration of the build of gpu-launch's wheel, seconds.
_LAPTOP_BUILD_S = 300.0
_LAPTOP_LABEL = "gpu-launch for laptops"
#: What does not belong to the sources of gpu-launch in the folder of its distribution.
_NOT_COPIED = ("__pycache__", "*.egg-info", "build", "gpuhub_lab")
#: The file with the digest of the sources of gpu-launch's wheel.
_LAPTOP_DIGEST = "sources.sha256"
#: Name of the JupyterLab extension's wheel, and the longest build with npm's downloads, seconds.
LAB_EXTENSION = "lab-extension"
_LAB_BUILD_S = 600.0
_CUDA_VERSION = re.compile(r"^cuda\b[^=\n]*= *['\"]([^'\"]*)", re.MULTILINE)


def ensure_locked_wheels(
    folder: Path, *, name: str, key: str, lock: str, machine: str, report: ProgressCallback
) -> Path:
    """Return the folder with the wheels of a lock; missing ones are downloaded, those of its other versions removed.

    Args:
        folder: Holds a folder `NAME-KEY` for each kind of packages.
        key: Differs if any of the wheels does.

    Raises:
        SetupError: pip is missing or failed.
    """

    def download(target: Path, label: str) -> None:
        lock_file = target / "requirements.lock"
        lock_file.write_text(lock, encoding="utf-8")
        command = build_lock_command(find_pip(), lock_file, machine)
        run_with_progress(command, label=label, report=report, deadline_s=_DEADLINE_S)
        lock_file.unlink()

    return _ensure_downloaded(folder, name, key, download, report)


def ensure_torch_wheels(
    folder: Path,
    *,
    key: str,
    settings: ImageSettings,
    locked: Collection[str],
    machine: str,
    report: ProgressCallback,
) -> Path:
    """Return the folder with the wheels of torch and of NVIDIA's libraries for it, as `ensure_locked_wheels` does.

    Args:
        locked: Names of packages in the locks; the image's own layers for them have their wheels.

    Raises:
        SetupError: pip is missing or failed, or found another build of torch than the configured one.
    """

    def download(target: Path, label: str) -> None:
        for command in build_torch_commands(find_pip(), target, settings, machine):
            run_with_progress(command, label=label, report=report, deadline_s=_DEADLINE_S)
        for wheel in list(target.iterdir()):
            if _find_project(wheel) in locked:
                wheel.unlink()
        check_torch(target, settings)

    return _ensure_downloaded(folder, TORCH_WHEELS, key, download, report)


def ensure_lab_wheel(folder: Path, *, key: str, files: Mapping[str, bytes], report: ProgressCallback) -> Path:
    """Return the folder with the JupyterLab extension's wheel, as `ensure_locked_wheels` does; npm builds it.

    Args:
        files: The sources, by path.

    Raises:
        SetupError: pip or npm is missing or failed.
    """

    def build(target: Path, label: str) -> None:
        source = target / "source"
        for name, content in files.items():
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        command = [*_build_wheel_command(find_pip(), target), "--verbose", str(source)]
        run_with_progress(command, label=label, report=report, deadline_s=_LAB_BUILD_S)
        shutil.rmtree(source)

    return _ensure_downloaded(folder, LAB_EXTENSION, key, build, report)


def _build_wheel_command(pip: Sequence[str], folder: Path) -> list[str]:
    """Return the command that builds a wheel of the tree that is added to it.

    The locked build tools are used: an isolated build would download others, which no lock names.
    """
    return [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]


def _ensure_downloaded(
    folder: Path, name: str, key: str, download: Callable[[Path, str], None], report: ProgressCallback
) -> Path:
    wheels, label = folder / f"{name}-{key}", f"{_LABEL}: {name}"
    if not wheels.exists():
        partial = folder / f"{name}-{key}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        download(partial, label)
        partial.rename(wheels)
        size = sum(wheel.stat().st_size for wheel in wheels.iterdir())
        report(ProgressStep(label=label, done=size, text="downloaded", is_finished=True))
    for other in folder.iterdir():
        # A name without a dash is of gpuhub 0.1, which had one folder for all.
        if other != wheels and other.name.rpartition("-")[0] in {name, ""}:
            shutil.rmtree(other, ignore_errors=True)
    return wheels


def _find_project(wheel: Path) -> str:
    """Return the name of a wheel's project, as locks have it."""
    return re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()


def find_pip() -> list[str]:
    """Return the command of pip: this environment's, or the system's."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    system = shutil.which("pip3")
    if system is None:
        raise SetupError("pip is needed to download the images' packages: install python3-pip")
    return [system]


def build_lock_command(pip: Sequence[str], lock: Path, machine: str) -> list[str]:
    """Return the command that downloads a lock's packages into its folder; the lock has a hash for each file."""
    return [*_build_download(pip, lock.parent, machine), "--no-deps", "--require-hashes", "--requirement", str(lock)]


def build_torch_commands(pip: Sequence[str], folder: Path, settings: ImageSettings, machine: str) -> list[list[str]]:
    """Return the commands that download torch, then what it depends on.

    Another index for torch replaces pip's own index and provides nothing else: with both, any package of the same name
    in either could be chosen.
    """
    index = ["--index-url", settings.torch_index] if settings.torch_index else []
    download = _build_download(pip, folder, machine)
    torch = f"torch=={settings.torch}"
    return [
        [*download, "--no-deps", *index, torch],
        # The torch of the folder, because pip prefers a local version such as 2.13.0+cpu, and local files to an index.
        [*download, "--find-links", str(folder), torch],
    ]


def _build_download(pip: Sequence[str], folder: Path, machine: str) -> list[str]:
    return [*pip, "download", "--progress-bar", "off", "--dest", str(folder), *build_platform_options(machine)]


def build_platform_options(machine: str) -> list[str]:
    """Return pip's options for wheels that fit the images' Python, independent of pip's own Python."""
    fitting = ["--only-binary=:all:", "--python-version", _PYTHON, "--implementation", "cp"]
    for abi in ("cp311", "abi3", "none"):
        fitting += ["--abi", abi]
    for platform in list_platforms(machine):
        fitting += ["--platform", platform]
    return fitting


def list_platforms(machine: str) -> list[str]:
    """Return pip's names of Linux platforms of a machine type with a C library not newer than bookworm's.

    pip does not imply older platforms, so each one is named.
    """
    names = [f"manylinux_2_{minor}_{machine}" for minor in reversed(_GLIBC_MINORS)]
    return [*names, f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}", f"linux_{machine}"]


def check_torch(wheels: Path, settings: ImageSettings) -> None:
    """Check that torch has the build in the settings."""
    (wheel,) = wheels.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        build = find_torch_build(archive.read("torch/version.py").decode())
    if settings.torch_build in ("auto", build):
        return
    raise SetupError(
        f"images.torch_build is {settings.torch_build!r}, but pip found the {build} build of torch {settings.torch} "
        f"({wheel.name}): set images.torch_index to the package index of the {settings.torch_build} build, "
        "which pytorch.org/get-started shows"
    )


def find_torch_build(version_module: str) -> str:
    """Return `cuda` or `cpu` for the text of torch/version.py; a CUDA build has `cuda: Optional[str] = '12.8'`."""
    return "cuda" if _CUDA_VERSION.search(version_module) else "cpu"


def find_torch_cuda(folder: Path) -> str | None:
    """Return the CUDA version, such as `12.8`, of the torch from which images were built here last.

    None where nothing was built, or torch has no CUDA.

    Args:
        folder: The folder of `ensure_torch_wheels`.
    """
    for wheel in folder.glob("*/torch-*.whl"):
        if wheel.parent.suffix != ".partial":
            text = read_wheel_file(wheel.parent, "torch", "torch/version.py").decode()
            if match := _CUDA_VERSION.search(text):
                return match[1]
    return None


def read_wheel_file(wheels: Path, distribution: str, name: str) -> bytes:
    """Read a file from the wheel of a distribution, such as `pynvml.py` of `nvidia_ml_py`."""
    (wheel,) = wheels.glob(f"{distribution}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name)


def ensure_laptop_wheel(source: Path, folder: Path, report: ProgressCallback) -> Path:
    """Build gpu-launch's wheel into `folder` unless the one there is of the same sources, and return it.

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
    if len(wheels) == 1 and _read(folder / _LAPTOP_DIGEST) == digest:
        return wheels[0]
    shutil.rmtree(folder, ignore_errors=True)
    # The hub serves the folder's wheel to anyone: it holds no secret.
    folder.mkdir(parents=True, mode=0o755)
    # A copy: setuptools writes into the tree that it builds.
    copy = folder / "build"
    shutil.copytree(distribution, copy, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    command = [*_build_wheel_command(find_pip(), folder), "--quiet", str(copy)]
    run_with_progress(command, label=_LAPTOP_LABEL, report=report, deadline_s=_LAPTOP_BUILD_S)
    shutil.rmtree(copy)
    (folder / _LAPTOP_DIGEST).write_text(digest, encoding="utf-8")
    (wheel,) = folder.glob("gpu_launch-*.whl")
    return wheel


def _hash_sources(distribution: Path) -> str:
    return hash_parts((distribution / "pyproject.toml").read_text("utf-8"), read_tree(distribution / "gpu_launch"))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
