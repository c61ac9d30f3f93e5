"""The simulated NVIDIA driver: compiled from source, once for each version of it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpuhub.closet import shell
from gpuhub.closet.places import NodePlaces, driver_folder
from gpuhub.errors import SetupError
from gpuhub.paths import Paths

SOURCE = Path(__file__).parent / "nvidia"
HOOK_SOURCE = Path(__file__).parent / "hook.py"
#: The name under which dockerd looks for NVIDIA's toolkit.
HOOK_NAME = "nvidia-container-runtime-hook"

# An older language standard keeps newer C libraries from binding to functions that older images lack.
_FLAGS = ("-std=gnu17", "-O1", "-Wall", "-Wextra", "-fvisibility=hidden")


@dataclass(frozen=True, slots=True)
class Driver:
    """The compiled files."""

    folder: Path

    @property
    def library(self) -> Path:
        """What NVIDIA's Python package loads."""
        return self.folder / "libnvidia-ml.so.1"

    @property
    def smi(self) -> Path:
        """The stand-in for nvidia-smi, statically linked."""
        return self.folder / "nvidia-smi"


def build_commands(target: Path, compiler: str = "gcc") -> tuple[tuple[str, ...], ...]:
    """The compiler's command lines."""
    nvml = (str(SOURCE / "cards.c"), str(SOURCE / "nvml.c"))
    shared = ("-fPIC", "-shared", "-Wl,-soname,libnvidia-ml.so.1")
    return (
        (compiler, *_FLAGS, *shared, *nvml, "-o", str(target / "libnvidia-ml.so.1")),
        (compiler, *_FLAGS, "-static", *nvml, str(SOURCE / "nvidia_smi.c"), "-o", str(target / "nvidia-smi")),
    )


def source_digest() -> str:
    """A name that changes with the source, the flags and the machine's architecture."""
    digest = hashlib.sha256(repr((_FLAGS, platform.machine())).encode())
    for file in sorted(SOURCE.glob("*.[ch]")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def ensure_driver(paths: Paths) -> Driver:
    """Compile the driver unless this version is there; SetupError when there is no C compiler."""
    folder = driver_folder(paths) / source_digest()
    if folder.is_dir():
        return Driver(folder)
    if shutil.which("gcc") is None:
        raise SetupError(
            "the simulated NVIDIA driver is compiled with gcc, which is missing: apt-get install gcc libc6-dev"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        Path(made).chmod(0o755)
        for command in build_commands(Path(made)):
            shell.run(command)
        shutil.copytree(made, folder, dirs_exist_ok=True)
    return Driver(folder)


def library_folder(machine: str) -> str:
    """Where Debian's images keep shared libraries of a machine type."""
    return f"usr/lib/{machine}-linux-gnu"


def install_hook(places: NodePlaces, driver: Driver) -> None:
    """Put the hook and its settings where the node's dockerd looks for NVIDIA's toolkit."""
    places.toolkit.mkdir(parents=True, exist_ok=True)
    settings = {
        "cards": str(places.cards),
        "library": str(driver.library),
        "smi": str(driver.smi),
        "library_folder": library_folder(platform.machine()),
    }
    _replace(places.toolkit / "hook.json", json.dumps(settings, indent=2).encode(), 0o644)
    _replace(places.toolkit / HOOK_NAME, HOOK_SOURCE.read_bytes(), 0o755)


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Write a file as a whole: a container may start at this moment."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(content)
    fresh.chmod(mode)
    fresh.replace(path)
