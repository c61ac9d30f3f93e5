"""The GPU agent: what runs in one container on each node, with Python's standard library and pynvml alone.

Every two seconds it prints one line of JSON:
`{"n": 7, "error": null, "gpus": [{"uuid": "GPU-…", "index": 0, "name": "NVIDIA GeForce RTX 5090",
"memory_total_mib": 32607, "memory_used_mib": 4, "utilisation_percent": 0, "power_w": 12.5,
"temperature_c": 31, "processes": 0, "error": null}]}`.
`n` grows by one a line, so that a reader sees without comparing clocks that the agent is alive. A value that the GPU
cannot tell is null; `error` is NVML's text when a GPU, or NVML itself, fails.
The broker passes this file's text to `python3 -c`: it imports nothing of gpuhub.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

PERIOD_S = 2.0


def read_value(read: Callable[[], Any]) -> Any:
    """The value, or None where the GPU has no such sensor; other NVML errors go on."""
    import pynvml

    try:
        return read()
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission):
        return None


def as_text(value: Any) -> str:
    """NVML bindings return bytes or text, depending on their version."""
    return value.decode() if isinstance(value, bytes) else str(value)


def read_gpu(index: int) -> dict[str, Any]:
    """One GPU's reading; its `error` is set where it fails."""
    import pynvml

    reading: dict[str, Any] = {"index": index, "error": None}
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        reading["uuid"] = as_text(pynvml.nvmlDeviceGetUUID(handle))
        reading["name"] = as_text(pynvml.nvmlDeviceGetName(handle))
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        reading["memory_total_mib"] = int(memory.total) // 1024**2
        reading["memory_used_mib"] = int(memory.used) // 1024**2
        utilisation = read_value(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
        reading["utilisation_percent"] = None if utilisation is None else int(utilisation.gpu)
        power = read_value(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
        reading["power_w"] = None if power is None else power / 1000
        reading["temperature_c"] = read_value(
            lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
        )
        processes = read_value(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        reading["processes"] = None if processes is None else len(processes)
    except pynvml.NVMLError as error:
        reading["error"] = str(error)
    return reading


def read_node() -> dict[str, Any]:
    """All GPUs of the node. NVML stays open between readings: opening it wakes idle GPUs."""
    try:
        import pynvml
    except ImportError as error:
        return {"error": f"pynvml is missing in the image: {error}", "gpus": []}
    try:
        pynvml.nvmlInit()
        return {"error": None, "gpus": [read_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]}
    except pynvml.NVMLError as error:
        return {"error": f"NVML: {error}", "gpus": []}


def close_nvml() -> None:
    """Close NVML as often as it was opened, so that a driver that comes back is found by the next reading."""
    import pynvml

    try:
        while True:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return


def main() -> None:
    """Print readings until the container is stopped."""
    n = 0
    while True:
        began = time.monotonic()
        n += 1
        reading = read_node()
        if reading["error"] is not None and "pynvml" in sys.modules:
            close_nvml()
        sys.stdout.write(json.dumps({"n": n, **reading}) + "\n")
        sys.stdout.flush()
        time.sleep(max(0.1, PERIOD_S - (time.monotonic() - began)))


if __name__ == "__main__":
    main()
