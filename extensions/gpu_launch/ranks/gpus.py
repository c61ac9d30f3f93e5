"""What this container's GPUs do, read in a thread of its own: NVML may be missing, and may hang."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PERIOD_S = 1.0
_MIB = 1024**2


class Gpus:
    """Reads once a second while somebody is interested; never blocks who asks."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """`uuids` are the container's own; empty for all that NVML shows."""
        self._uuids = tuple(uuids)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()
        self._readings: list[dict[str, Any]] = []
        self._number = 0

    def begin(self) -> None:
        """Read from now on. A thread that hangs in an earlier reading is not doubled."""
        with self._lock:
            self._wanted.set()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._read, name="gpu_launch GPUs", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Read no more."""
        self._wanted.clear()

    def latest(self, after: int) -> tuple[int, list[dict[str, Any]]]:
        """The number of the latest reading and its values; none where that number is `after`."""
        with self._lock:
            return self._number, [] if self._number == after else self._readings

    def name(self, local_rank: int, environ: Mapping[str, str]) -> str:
        """The GPU that a rank takes by its local rank: model and UUID, or what of them is known."""
        with self._lock:
            known = [(str(reading["uuid"]), str(reading["model"] or "")) for reading in self._readings]
        return choose(local_rank, known or [(uuid, "") for uuid in self._uuids], environ.get("CUDA_VISIBLE_DEVICES"))

    def _read(self) -> None:
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        try:
            handles = _handles(pynvml, self._uuids)
            while handles:
                self._wanted.wait()
                found = [_reading(pynvml, handle) for handle in handles]
                with self._lock:
                    self._readings, self._number = found, self._number + 1
                time.sleep(_PERIOD_S)
        except pynvml.NVMLError:
            return
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()


def choose(local_rank: int, known: Sequence[tuple[str, str]], visible: str | None) -> str:
    """Model and UUID of the GPU with a local rank's number, as CUDA_VISIBLE_DEVICES orders them. Pure."""
    if visible is not None:
        by_uuid = {uuid: (uuid, model) for uuid, model in known}
        words = [word.strip() for word in visible.split(",")]
        ordered = [
            known[int(word)] if word.isdecimal() and int(word) < len(known) else by_uuid.get(word) for word in words
        ]
    else:
        ordered = list(known)
    found = ordered[local_rank] if local_rank < len(ordered) else None
    return "" if found is None else f"{found[1]} {found[0]}".strip()


def _handles(nvml: Any, uuids: Sequence[str]) -> list[Any]:
    """Of the GPUs with these UUIDs; of all where NVML knows none of them."""
    found = []
    for uuid in uuids:
        with contextlib.suppress(nvml.NVMLError):
            found.append(nvml.nvmlDeviceGetHandleByUUID(uuid))
    return found or [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def _reading(nvml: Any, handle: Any) -> dict[str, Any]:
    def ask(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except nvml.NVMLError:
            return None

    memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    return {
        "uuid": ask(lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
        "model": ask(lambda: _text(nvml.nvmlDeviceGetName(handle))),
        "use_percent": ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "memory_mib": memory and memory.used // _MIB,
        "memory_total_mib": memory and memory.total // _MIB,
        "power_w": ask(lambda: round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000)),
        "power_limit_w": ask(lambda: round(nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)),
    }


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
