"""The ranks of `gpu-launch serve` on this machine, with cards whose memory a test chooses; each rank runs this module.

`SERVED_MEMORY` has the MiB of each rank's card. `SERVED_FAILURE` is the rank that fails at its step of that number.
"""

from __future__ import annotations

import os
from typing import Any

from gpu_launch.serving import server_main, stage


def main() -> None:
    """Serve with the chosen memory."""
    rank = int(os.environ["RANK"])
    if memory := os.environ.get("SERVED_MEMORY"):
        server_main.measure_memory = lambda _device: int(memory.split(",")[rank])
    if failure := os.environ.get("SERVED_FAILURE"):
        failing, number = map(int, failure.split(":"))
        if failing == rank:
            _fail_at(number)
    server_main.main()


def _fail_at(number: int) -> None:
    compute, steps = stage.Stage.compute, iter(range(number))

    def count(self: stage.Stage, *given: Any) -> Any:
        if next(steps, None) is None:
            raise RuntimeError("this card fell off the bus")
        return compute(self, *given)

    stage.Stage.compute = count  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
