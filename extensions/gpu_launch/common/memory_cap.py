"""Limits torch to a GPU share's memory, in each process that imports torch.

The cap only counts torch's allocations in one process, so it does not protect against other programs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from gpu_launch import environment

_MIB = 1024**2


def load_ipython_extension(_shell: Any) -> None:
    """Install the cap in a kernel, see `image_config`."""
    install()


def install() -> None:
    """Limit torch, imported before or later, to GPUHUB_GPU_MEMORY_CAP_MIB, if that is set."""
    cap = environment.read().memory_cap_mib
    if cap is not None:
        call_after_import("torch", lambda torch: limit_process(torch, cap))


def limit_process(torch: Any, cap_mib: int) -> None:
    """Limit this process to `cap_mib` on the container's GPU, from its first use of CUDA on.

    Doing so earlier would start CUDA in every process that imports torch, which costs time and memory and breaks
    processes that fork.
    """

    def apply() -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_mib * _MIB / total), 0)

    torch.cuda._lazy_call(apply)


def call_after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with the module after its import; at once if it is imported already."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module with the other finders and wraps its loader."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._done)
        return spec

    def _done(self, module: ModuleType) -> None:
        # Not earlier: testing whether the module exists does not import it.
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then(module)


class _Loader(importlib.abc.Loader):
    """The module's own loader, followed by a callback."""

    def __init__(self, loader: importlib.abc.Loader, done: Callable[[ModuleType], None]) -> None:
        self._loader, self._done = loader, done

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._done(module)
