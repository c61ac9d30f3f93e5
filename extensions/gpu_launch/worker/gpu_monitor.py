"""Readings of a container's GPUs, and their values as the notebook shows them.

Readings are taken in a separate thread, because NVML may be missing or hang.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PERIOD_S = 1.0  # seconds between readings
_MIB = 1024**2
#: As the broker shortens names.
_VENDOR = re.compile(r"^(nvidia\s+)?(geforce\s+|tesla\s+)?", re.IGNORECASE)
_UUID = re.compile(r"\b(?:GPU|MIG)-[0-9a-zA-Z/-]+")


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

    # Version 2 excludes the driver's own memory, hundreds of MiB on large cards; older drivers count it as used.
    memory = query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
    memory = memory or query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
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


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """State of a GPU; None means unknown."""

    node: str
    uuid: str = ""
    model: str = ""
    use_percent: float | None = None
    memory_mib: float | None = None
    memory_total_mib: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


def parse_gpu_reading(node: str, reading: Mapping[str, Any]) -> GpuSample:
    """Parse a reading of an agent's `gpus` message; values that are not numbers count as unknown."""

    def number(name: str) -> float | None:
        value = reading.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if is_number else None  # type: ignore[arg-type]

    return GpuSample(
        node=node,
        uuid=str(reading.get("uuid") or ""),
        model=shorten_model(str(reading.get("model") or "")),
        use_percent=number("use_percent"),
        memory_mib=number("memory_mib"),
        memory_total_mib=number("memory_total_mib"),
        power_w=number("power_w"),
        power_limit_w=number("power_limit_w"),
    )


def shorten_model(model: str) -> str:
    """Shorten `NVIDIA GeForce RTX 5090` to `RTX 5090`, and `Tesla T4` to `T4`."""
    return " ".join(_VENDOR.sub("", model.strip(), count=1).split())


def shorten_uuid(uuid: str) -> str:
    """Shorten to `GPU-1a2b…`."""
    kind, _, rest = uuid.partition("-")
    return f"{kind}-{rest[:4]}…" if len(rest) > 4 else uuid


def format_gpu_name(text: str) -> str:
    """Format a rank's GPU, given as model and UUID in one text, as `RTX 5090 (GPU-1a2b…)`."""
    match = _UUID.search(text)
    uuid = shorten_uuid(match[0]) if match else ""
    model = shorten_model(_UUID.sub("", text).strip(" ,;:()"))
    return f"{model} ({uuid})" if model and uuid else model or uuid
