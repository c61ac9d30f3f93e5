"""The simulated NVIDIA driver, compiled from source once for each version of it."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub_closet import shell
from gpuhub_closet.paths import NodePaths, driver_folder

SOURCE = Path(__file__).parent / "nvidia"
HOOK_SOURCE = Path(__file__).parent / "hook.py"
#: The name of NVIDIA's toolkit on the PATH of dockerd.
HOOK_NAME = "nvidia-container-runtime-hook"

# An older language standard keeps newer C libraries from binding to functions that older images lack.
_FLAGS = ("-std=gnu17", "-O1", "-Wall", "-Wextra", "-fvisibility=hidden")


@dataclass(frozen=True, slots=True)
class SimulatedDriver:
    """The compiled files."""

    folder: Path

    @property
    def library(self) -> Path:
        """The NVML library, which NVIDIA's Python package loads."""
        return self.folder / "libnvidia-ml.so.1"

    @property
    def cuda(self) -> Path:
        """The CUDA driver's library, with the calls that move GPU memory alone."""
        return self.folder / "libcuda.so.1"

    @property
    def nvidia_smi(self) -> Path:
        """The stand-in for nvidia-smi, statically linked."""
        return self.folder / "nvidia-smi"


def build_compile_commands(target: Path, compiler: str = "gcc") -> tuple[tuple[str, ...], ...]:
    """Return the compiler's command lines."""
    nvml = (str(SOURCE / "cards.c"), str(SOURCE / "nvml.c"))
    cuda = (str(SOURCE / "cards.c"), str(SOURCE / "cuda.c"))
    shared = ("-fPIC", "-shared")
    return (
        (compiler, *_FLAGS, *shared, "-Wl,-soname,libnvidia-ml.so.1", *nvml, "-o", str(target / "libnvidia-ml.so.1")),
        (compiler, *_FLAGS, *shared, "-Wl,-soname,libcuda.so.1", *cuda, "-o", str(target / "libcuda.so.1")),
        (compiler, *_FLAGS, "-static", *nvml, str(SOURCE / "nvidia_smi.c"), "-o", str(target / "nvidia-smi")),
    )


def hash_sources() -> str:
    """Return a name that changes with the source, the flags and the machine's architecture."""
    digest = hashlib.sha256(repr((_FLAGS, platform.machine())).encode())
    for file in sorted(SOURCE.glob("*.[ch]")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def ensure_driver(paths: Paths) -> SimulatedDriver:
    """Compile the driver unless this version exists.

    Raises:
        SetupError: The C compiler is missing.
    """
    folder = driver_folder(paths) / hash_sources()
    if folder.is_dir():
        return SimulatedDriver(folder)
    if shutil.which("gcc") is None:
        raise SetupError(
            "the simulated NVIDIA driver is compiled with gcc, which is missing: apt-get install gcc libc6-dev"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        Path(made).chmod(0o755)
        for command in build_compile_commands(Path(made)):
            shell.run_command(command)
        shutil.copytree(made, folder, dirs_exist_ok=True)
    return SimulatedDriver(folder)


def find_library_folder(machine: str) -> str:
    """Return the folder of shared libraries in Debian's images for a machine type."""
    return f"usr/lib/{machine}-linux-gnu"


def install_hook(paths: NodePaths, driver: SimulatedDriver) -> None:
    """Put the hook and its settings where the node's dockerd finds NVIDIA's toolkit."""
    paths.toolkit.mkdir(parents=True, exist_ok=True)
    settings = {
        "cards": str(paths.gpus),
        "library": str(driver.library),
        "cuda": str(driver.cuda),
        "smi": str(driver.nvidia_smi),
        "library_folder": find_library_folder(platform.machine()),
    }
    # Replaced as a whole, because a container may start at this moment.
    shell.replace_file(paths.toolkit / "hook.json", json.dumps(settings, indent=2).encode())
    shell.replace_file(paths.toolkit / HOOK_NAME, HOOK_SOURCE.read_bytes(), 0o755)
