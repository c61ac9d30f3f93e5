"""How many threads a rank's libraries use: what they would have chosen, had they started in its environment."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
#: OpenBLAS as numpy and scipy bring it, and as distributions do.
_OPENBLAS_SETTERS = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads")


def wanted(environ: Mapping[str, str], *, cores: int, has_mkl: bool) -> int:
    """torch's number in a process started with `environ`. Pure."""
    names = ("MKL_NUM_THREADS", "OMP_NUM_THREADS") if has_mkl else ("OMP_NUM_THREADS",)
    for name in names:
        first = environ.get(name, "").split(",")[0].strip()
        if first.isdecimal() and int(first):
            return int(first)
    return cores


def apply(environ: Mapping[str, str]) -> None:
    """Give the libraries that are imported already the numbers of `environ`."""
    torch = sys.modules["torch"]
    cpus = os.sched_getaffinity(0)
    has_mkl = bool(torch.backends.mkl.is_available())
    number = wanted(environ, cores=_cores(cpus) if has_mkl else len(cpus), has_mkl=has_mkl)
    if number != torch.get_num_threads():
        torch.set_num_threads(number)
    blas = wanted({"OMP_NUM_THREADS": environ.get("OPENBLAS_NUM_THREADS") or environ.get("OMP_NUM_THREADS", "")},
                  cores=len(cpus), has_mkl=False)  # fmt: skip
    if blas != 1:
        _set_openblas(blas)


def _cores(cpus: Collection[int]) -> int:
    """Physical cores among these CPUs: MKL uses one thread on each."""
    siblings = set()
    for cpu in cpus:
        try:
            siblings.add((_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
        except OSError:
            return len(cpus)
    return len(siblings)


def _set_openblas(number: int) -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split()[-1] for line in maps if "openblas" in line}:
        library = ctypes.CDLL(path)
        for name in _OPENBLAS_SETTERS:
            if hasattr(library, name):
                getattr(library, name)(number)
                break
