"""Checks whether a process may fork ranks, and whether its imported modules are still up to date."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
#: Read only when the interpreter, its allocator, torch or one of its libraries starts.
_START_PREFIXES = (
    "LD_", "PYTHON", "LC_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_",
    "BLIS_", "TORCH", "PYTORCH_", "TRITON_",
)  # fmt: skip
_START_NAMES = frozenset({"LANG", "LANGUAGE", "LOGLEVEL"})
#: The fork server sets its own values of these, and so does each rank. Other names count while a rank runs.
_EXCLUDED_NAMES = frozenset(
    {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTORCH_NVML_BASED_CUDA_CHECK"}
)
_EXCLUDED_PREFIXES = ("TORCHELASTIC_", "TORCH_ELASTIC_")

#: A file's path, modification time in ns and size in bytes.
FileStamp = tuple[str, int, int]


def select_start_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that only count when Python and torch start."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(_START_PREFIXES) or name in _START_NAMES)
        and name not in _EXCLUDED_NAMES
        and not name.startswith(_EXCLUDED_PREFIXES)
    }


def find_problem() -> str:
    """Return why this process must not fork, empty if it may."""
    threads = _list_threads()
    if len(threads) > 1:
        return f"{len(threads)} threads run where there may be one ({', '.join(sorted(set(threads)))})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "torch has initialised CUDA"
    if _is_driver_in_use():
        return "the CUDA driver is initialised"
    return ""


def collect_stamps(modules: Iterable[ModuleType], home: Path) -> list[FileStamp]:
    """Stamp the files of modules below `home` outside installed packages, and the folders of installed packages."""
    packages = [Path(entry) for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    files = {Path(name) for module in modules if (name := getattr(module, "__file__", None))}
    own_files = {
        file
        for file in files
        if file.is_relative_to(home) and not any(file.is_relative_to(folder) for folder in packages)
    }
    file_stamps = (read_stamp(str(path)) for path in sorted([*packages, *own_files]))
    return [entry for entry in file_stamps if entry is not None]


def read_stamp(path: str) -> FileStamp | None:
    """Return a file's stamp, None if it does not exist."""
    try:
        status = os.stat(path)  # noqa: PTH116 - many of them
    except OSError:
        return None
    return path, status.st_mtime_ns, status.st_size


def has_changed(before: Iterable[FileStamp]) -> bool:
    """Return whether any of these files has changed."""
    return any(read_stamp(entry[0]) != tuple(entry) for entry in before)


def _list_threads() -> list[str]:
    """Return the names of this process's threads."""
    return [(entry / "comm").read_text().strip() for entry in Path("/proc/self/task").iterdir()]


def _is_driver_in_use() -> bool:
    """Return whether any library has initialised the CUDA driver in this process. The check does not initialise it."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if entry.readlink().name.startswith("nvidia-uvm"):
                return True
        except OSError:
            continue  # the descriptor of this listing
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcuda.so" in line}
    return any(
        ctypes.CDLL(library).cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED for library in libraries
    )
