"""A kernel without a notebook: reads one JSON command a line, launches, and answers with one line.

It is copied to the machine that launches and needs only gpu_launch. Commands: `{"script", "arguments", "nnodes",
"fresh": release the worker pools before, "cold": use torchrun itself, "interrupt_after_s": seconds from the ranks'
first line to SIGINT}`; answers: `{"seconds", "first", "cpu_s", "text", "error"}`.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

MARK = "ANSWER "


class Clock(io.TextIOBase):
    """Collects a launch's output and the time of the ranks' first line."""

    def __init__(self, on_first: Any) -> None:
        self.parts: list[str] = []
        self.first: float | None = None
        self._on_first = on_first

    def write(self, text: str) -> int:
        """Collect the text."""
        if self.first is None and ("first line" in text or "going on" in text):
            self.first = time.monotonic()
            self._on_first()
        self.parts.append(text)
        return len(text)


def cpu_s() -> float:
    """Return the CPU time of this process so far, seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Launch once and return the measurements."""
    import gpu_launch
    from gpu_launch.launch.workers.worker_pool import worker_pools

    if order.get("fresh"):
        worker_pools.free_idle()
    interrupted: list[float] = []

    def interrupt_soon() -> None:
        if (after := order.get("interrupt_after_s")) is not None:
            threading.Timer(after, interrupt).start()

    def interrupt() -> None:
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    clock = Clock(interrupt_soon)
    real = sys.stdout, sys.stderr
    error = ""
    began, cpu = time.monotonic(), cpu_s()
    try:
        sys.stdout = sys.stderr = clock
        gpu_launch.run(
            order["script"],
            [str(one) for one in order.get("arguments", ())],
            nnodes=order["nnodes"],
            cold=bool(order.get("cold")),
        )
    except (gpu_launch.GpuLaunchError, KeyboardInterrupt) as found:
        error = f"{type(found).__name__}: {found}"
    finally:
        sys.stdout, sys.stderr = real
    ended = time.monotonic()
    return {
        "seconds": ended - began,
        "first": None if clock.first is None else clock.first - began,
        "interrupt_s": ended - interrupted[0] if interrupted else None,
        "cpu_s": cpu_s() - cpu,
        "text": "".join(clock.parts)[-6000:],
        "error": error,
    }


def main() -> None:
    """Serve commands until the input ends."""
    for line in sys.stdin:
        print(MARK + json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
