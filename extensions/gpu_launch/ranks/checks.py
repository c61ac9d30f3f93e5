"""Whether a process may fork ranks, and whether what it has imported is still what a new one would import."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
#: Read when the interpreter, its allocator, torch or a library of its starts; later changes have no effect.
_START_PREFIXES = (
    "LD_", "PYTHON", "LC_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_",
    "BLIS_", "TORCH", "PYTORCH_", "TRITON_",
)  # fmt: skip
_START_NAMES = frozenset({"LANG", "LANGUAGE", "LOGLEVEL"})
#: The fork server has its own of these, and each rank sets its own; the rest is for a rank's own time.
_NEVER = frozenset(
    {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTORCH_NVML_BASED_CUDA_CHECK"}
)
_NEVER_PREFIXES = ("TORCHELASTIC_", "TORCH_ELASTIC_")

#: A file, its time and its size.
Stamp = tuple[str, int, int]


def start_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those that only count when Python and torch start."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(_START_PREFIXES) or name in _START_NAMES)
        and name not in _NEVER
        and not name.startswith(_NEVER_PREFIXES)
    }


def find_problem() -> str:
    """Why this process must not fork, in words; empty for nothing."""
    threads = _threads()
    if len(threads) > 1:
        return f"{len(threads)} threads run where there may be one ({', '.join(sorted(set(threads)))})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "torch has initialised CUDA"
    if _is_driver_in_use():
        return "the CUDA driver is initialised"
    return ""


def stamps(modules: Iterable[ModuleType], home: Path) -> list[Stamp]:
    """The files of modules below `home` that are no installed packages, and the folders of those."""
    packages = [Path(entry) for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    files = {Path(name) for module in modules if (name := getattr(module, "__file__", None))}
    own = {
        file
        for file in files
        if file.is_relative_to(home) and not any(file.is_relative_to(folder) for folder in packages)
    }
    found = (stamp(str(path)) for path in sorted([*packages, *own]))
    return [entry for entry in found if entry is not None]


def stamp(path: str) -> Stamp | None:
    """None where there is no such file."""
    try:
        found = os.stat(path)  # noqa: PTH116 - many of them
    except OSError:
        return None
    return path, found.st_mtime_ns, found.st_size


def has_changed(before: Iterable[Stamp]) -> bool:
    """Whether any of these files is another one by now."""
    return any(stamp(entry[0]) != tuple(entry) for entry in before)


def _threads() -> list[str]:
    """The names of this process's threads."""
    return [(entry / "comm").read_text().strip() for entry in Path("/proc/self/task").iterdir()]


def _is_driver_in_use() -> bool:
    """Whether CUDA's driver was initialised here, by whatever library; asking does not initialise it."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if entry.readlink().name.startswith("nvidia-uvm"):
                return True
        except OSError:
            continue  # the listing's own
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcuda.so" in line}
    return any(
        ctypes.CDLL(library).cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED for library in libraries
    )
