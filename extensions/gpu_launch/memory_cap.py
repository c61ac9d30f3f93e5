"""A container with a part of a GPU keeps to it: the cap is set for each process that imports torch.

It is a promise, not a wall: it counts what torch allocates in one process, and nothing else.
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
    """For kernels, see `image_config`."""
    install()


def install() -> None:
    """Have torch, imported before or later, keep to GPUHUB_GPU_MEMORY_CAP_MIB. Nothing where it is not set."""
    cap = environment.read().memory_cap_mib
    if cap is not None:
        after_import("torch", lambda torch: limit(torch, cap))


def limit(torch: Any, cap_mib: int) -> None:
    """Let this process allocate `cap_mib` on the container's GPU.

    From the moment at which CUDA is first used: asking for it sooner would start CUDA in every process that imports
    torch, which costs time and memory, and breaks those that fork. Without CUDA that moment never comes.
    """

    def apply() -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_mib * _MIB / total), 0)

    torch.cuda._lazy_call(apply)


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with the module as soon as it has been imported; at once where it has been already."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module where the other finders do, with a loader that calls back once."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._done)
        return spec

    def _done(self, module: ModuleType) -> None:
        # Not before: whoever only asks whether the module exists does not import it.
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then(module)


class _Loader(importlib.abc.Loader):
    """The module's own loader, and a call when it has done its work."""

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
