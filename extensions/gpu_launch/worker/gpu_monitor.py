"""Readings of this container's GPUs, taken in a separate thread because NVML may be missing or hang."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PERIOD_S = 1.0
_MIB = 1024**2


class GpuMonitor:
    """Reads the GPUs once a second between `start` and `stop`; callers never wait for NVML."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """Watch the GPUs with these UUIDs, or all that NVML shows if there are none."""
        self._uuids = tuple(uuids)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()
        self._readings: list[dict[str, Any]] = []
        self._number = 0

    def start(self) -> None:
        """Start reading. A thread that hangs in an earlier reading is not started twice."""
        with self._lock:
            self._wanted.set()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._read, name="gpu_launch GPUs", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop reading."""
        self._wanted.clear()

    def latest(self, after: int) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of the latest reading and its values; no values if that number is `after`."""
        with self._lock:
            return self._number, [] if self._number == after else self._readings

    def describe_gpu(self, local_rank: int, environ: Mapping[str, str]) -> str:
        """Return model and UUID, as far as known, of the GPU that a rank uses."""
        with self._lock:
            gpus = [(str(reading["uuid"]), str(reading["model"] or "")) for reading in self._readings]
        return choose_gpu(local_rank, gpus or [(uuid, "") for uuid in self._uuids], environ.get("CUDA_VISIBLE_DEVICES"))

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
            handles = _open_handles(pynvml, self._uuids)
            while handles:
                self._wanted.wait()
                readings = [_read_gpu(pynvml, handle) for handle in handles]
                with self._lock:
                    self._readings, self._number = readings, self._number + 1
                time.sleep(_PERIOD_S)
        except pynvml.NVMLError:
            return
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()


def choose_gpu(local_rank: int, gpus: Sequence[tuple[str, str]], visible: str | None) -> str:
    """Return model and UUID of the GPU with a local rank's number, in the order of CUDA_VISIBLE_DEVICES."""
    if visible is not None:
        by_uuid = {uuid: (uuid, model) for uuid, model in gpus}
        entries = [entry.strip() for entry in visible.split(",")]
        ordered = [
            gpus[int(entry)] if entry.isdecimal() and int(entry) < len(gpus) else by_uuid.get(entry)
            for entry in entries
        ]
    else:
        ordered = list(gpus)
    gpu = ordered[local_rank] if local_rank < len(ordered) else None
    return "" if gpu is None else f"{gpu[1]} {gpu[0]}".strip()


def _open_handles(nvml: Any, uuids: Sequence[str]) -> list[Any]:
    """Open the GPUs with these UUIDs, or all if NVML knows none of them."""
    handles = []
    for uuid in uuids:
        with contextlib.suppress(nvml.NVMLError):
            handles.append(nvml.nvmlDeviceGetHandleByUUID(uuid))
    return handles or [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def _read_gpu(nvml: Any, handle: Any) -> dict[str, Any]:
    def query(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except nvml.NVMLError:
            return None

    memory = query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    return {
        "uuid": query(lambda: _decode(nvml.nvmlDeviceGetUUID(handle))),
        "model": query(lambda: _decode(nvml.nvmlDeviceGetName(handle))),
        "use_percent": query(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "memory_mib": memory and memory.used // _MIB,
        "memory_total_mib": memory and memory.total // _MIB,
        "power_w": query(lambda: round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000)),
        "power_limit_w": query(lambda: round(nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)),
    }


def _decode(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
