"""`-m` this module, then a script and its arguments: runs the script with few exact steps before powersgd and local begin."""

from __future__ import annotations

import runpy
import sys

from gpu_launch.training import ddp_communication

STEPS = 4

if __name__ == "__main__":
    ddp_communication.WARM_UP_STEPS = STEPS
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
