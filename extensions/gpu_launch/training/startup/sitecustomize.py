"""Imported by Python at its start in the commands of a task file with `--comm`: applies the mode to its training.

It also works in an environment of the user's own (Python 3.11 or later) in which gpu_launch is not installed. Another
`sitecustomize`, which this one hides, is run as well.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).parent


def _install() -> None:
    # A package without `gpu_launch/__init__.py`, which needs more than the standard library. It is forgotten again:
    # the program may import the whole one.
    package = ModuleType("gpu_launch")
    package.__path__ = [str(_FOLDER.parents[1])]
    sys.modules["gpu_launch"] = package
    try:
        from gpu_launch.training import ddp_communication
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "gpu_launch"]:
            del sys.modules[name]
    ddp_communication.install()


def _run_hidden() -> None:
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != _FOLDER.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_install()
_run_hidden()
