"""Runs a script or module as Python itself would, in a process that keeps to the container's part of a GPU.

`python -m gpu_launch.capped script.py ARGUMENTS` or `python -m gpu_launch.capped -m MODULE ARGUMENTS`
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from gpu_launch import memory_cap


def main() -> None:
    """Never returns to the caller's module: the script is `__main__`."""
    memory_cap.install()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        name = sys.argv[1]
        sys.argv = sys.argv[1:]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        # What Python does for a script; as a module we got the working folder instead.
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
