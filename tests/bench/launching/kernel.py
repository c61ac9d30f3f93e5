"""A notebook's kernel without the notebook: reads one JSON command a line, launches, and answers with one line.

Copied to where the launches are made, it needs gpu_launch alone. Commands:
`{"script", "arguments", "nnodes", "fresh": free the standing workers before, "cold": use torchrun itself,
"interrupt_after_s": SIGINT so long after the ranks' first line}`; answers: `{"seconds", "first", "cpu_s", "text", "error"}`.
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
    """Takes what a launch shows, and when the ranks' first line came."""

    def __init__(self, on_first: Any) -> None:
        self.parts: list[str] = []
        self.first: float | None = None
        self._on_first = on_first

    def write(self, text: str) -> int:
        """Keep it."""
        if self.first is None and ("first line" in text or "going on" in text):
            self.first = time.monotonic()
            self._on_first()
        self.parts.append(text)
        return len(text)


def cpu_s() -> float:
    """CPU time of this process so far, seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run(order: dict[str, Any]) -> dict[str, Any]:
    """One launch."""
    import gpu_launch
    from gpu_launch.crew import crews

    if order.get("fresh"):
        crews.release()
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
    """Until there are no more commands."""
    for line in sys.stdin:
        print(MARK + json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
