"""Whether the GPUs of several nodes become warmer together, which is a matter of the room and not of single GPUs.

The lines that a node's GPU agent left in Docker's log are the history. Of the last 20 minutes, each 5 are one window,
and a GPU has a median power and a median temperature in each. The rule:

- A GPU counts if its power was the same in all four windows, within 10 % or 15 W. Otherwise its own load explains its
  temperature. The first window has no other use: a GPU needs some minutes until a new load no longer warms it.
- Its rise is the difference between the temperatures of the last and of the second window, 10 minutes before, and 0 if
  the third one does not lie between them. The rise of a node is the median of its GPUs that count.
- The room becomes warmer if at least two nodes, and at least half of the nodes with a GPU that counts, have a rise of
  3 °C or more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from gpuhub.nodes.agent_container import parse_agent_line
from gpuhub.nodes.status import GpuReading
from gpuhub.ops.doctor.findings import Finding, ok, warning
from gpuhub.ops.doctor.node_facts import parse_docker_time

#: Length of a window, seconds, and the number of windows.
WINDOW_S = 300.0
WINDOWS = 4
#: Fewest readings of a GPU in a window; an agent that answers prints 150.
MIN_READINGS = 10
#: Power counts as the same within this share of it, or within this difference, watts.
SAME_POWER_SHARE = 0.1
SAME_POWER_W = 15.0
#: A node becomes warmer by at least this, °C.
MIN_RISE_C = 3.0
MIN_NODES = 2
_COMPARED_MINUTES = round((WINDOWS - 2) * WINDOW_S / 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastReading:
    """What a GPU agent reported at a time of its node's clock, Unix seconds."""

    at: float
    gpus: tuple[GpuReading, ...]


def parse_agent_log(log: bytes) -> list[PastReading]:
    """Parse the lines of a GPU agent after Docker's times; incomplete lines, and those with errors, are left out."""
    readings = []
    for line in log.splitlines():
        stamp, _, text = line.partition(b" ")
        reading = parse_agent_line(text)
        if reading is not None and reading.error is None:
            with suppress(ValueError):
                readings.append(PastReading(at=parse_docker_time(stamp.decode("ascii", "replace")), gpus=reading.gpus))
    return readings


def find_rise(history: Sequence[PastReading]) -> float | None:
    """Return a node's rise, °C; None where no GPU's load stayed the same, or the history is too short."""
    rises = [rise for windows in _split(history) if (rise := _find_gpu_rise(windows)) is not None]
    return median(rises) if rises else None


@dataclass(slots=True)
class _Window:
    powers: list[float]
    temperatures: list[int]


def _split(history: Sequence[PastReading]) -> list[list[_Window]]:
    """Return the windows of each GPU, the oldest first; MIG devices have the values of their GPU."""
    gpus: dict[int, list[_Window]] = defaultdict(lambda: [_Window([], []) for _ in range(WINDOWS)])
    end = max((reading.at for reading in history), default=0.0)
    for reading in history:
        position = WINDOWS - 1 - int((end - reading.at) // WINDOW_S)
        for gpu in reading.gpus if position >= 0 else ():
            if gpu.power_w is not None and gpu.temperature_c is not None:
                window = gpus[gpu.index][position]
                window.powers.append(gpu.power_w)
                window.temperatures.append(gpu.temperature_c)
    return list(gpus.values())


def _find_gpu_rise(windows: Sequence[_Window]) -> float | None:
    if any(len(window.powers) < MIN_READINGS for window in windows):
        return None
    powers = [median(window.powers) for window in windows]
    if max(powers) - min(powers) > max(SAME_POWER_W, SAME_POWER_SHARE * max(powers)):
        return None
    _, first, between, last = (median(window.temperatures) for window in windows)
    return last - first if first <= between <= last else 0.0


def check_temperature(histories: Mapping[str, Sequence[PastReading]]) -> Iterator[Finding]:
    """Check whether the room becomes warmer; without two nodes to compare, there is no finding."""
    rises = {node: rise for node, history in histories.items() if (rise := find_rise(history)) is not None}
    if len(rises) < MIN_NODES:
        return
    warmer = {node: rise for node, rise in rises.items() if rise >= MIN_RISE_C}
    if len(warmer) >= max(MIN_NODES, len(rises) / 2):
        nodes = ", ".join(f"{node} (by {rise:.0f} °C)" for node, rise in warmer.items())
        yield warning(
            "temperature",
            f"the room becomes warmer: within {_COMPARED_MINUTES} minutes and with the same load, GPUs became warmer "
            f"on {nodes}",
            "check its cooling, its door and its fans before the GPUs; `gpuhub node cordon NAME` keeps new work away",
        )
    else:
        yield ok(
            "temperature",
            f"the GPUs of {', '.join(rises)} do not become warmer together",
        )
