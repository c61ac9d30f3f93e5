"""The GPU agent: what runs in one container on each node, with Python's standard library and pynvml alone.

Every two seconds it prints one line of JSON, here with line breaks:
`{"n": 7, "boot_id": "0b4f…", "driver": "580.95.05", "error": null, "gpus": [{"uuid": "GPU-…", "index": 0,
"name": "NVIDIA GeForce RTX 5090", "memory_total_mib": 32607, "memory_used_mib": 4, "utilisation_percent": 0,
"power_w": 12.5, "temperature_c": 31, "processes": [{"pid": 4711, "memory_mib": 300}], "capability": [12, 0],
"mig": false, "parent": null, "ecc_uncorrected": null, "remap_failed": null, "error": null}]}`.
`n` grows by one a line, so that a reader sees without comparing clocks that the agent is alive. `boot_id` is the
machine's, from the kernel. A value that the GPU cannot tell is null; `error` is NVML's text when a GPU, or NVML itself,
fails. A GPU in MIG mode is not listed: its MIG devices are, with its index, and `parent` is its UUID. The ids of
processes are the machine's own, 32 a GPU at most.
NVML is read in a thread of its own: where a call does not return, the lines go on and say so.
A container loses the right to open its GPUs' devices when systemd is reloaded on some machines. What has them open goes
on, this agent too, so it tries to open one anew each time: what it lost, the users' containers have lost as well.
The broker passes this file's text to `python3 -c`: it imports nothing of gpuhub.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PERIOD_S = 2.0
#: NVML hangs when no reading is done for so long.
HANG_S = 6.0
#: Processes told of each GPU, at most.
MAX_PROCESSES = 32
BOOT_ID = "/proc/sys/kernel/random/boot_id"
#: The driver's own device, which every container with a GPU has; opening it wakes no GPU.
CONTROL_DEVICE = "/dev/nvidiactl"
DEVICES_LOST = "containers there have lost the right to open their GPUs"


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


def read_device(handle: Any) -> dict[str, Any]:
    """What a GPU and a MIG device both tell of themselves."""
    import pynvml

    # What the driver keeps for itself, hundreds of MiB on large cards, is nobody's use; older drivers count it as used.
    memory = read_value(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2))
    if memory is None:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    processes = read_value(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return {
        "uuid": as_text(pynvml.nvmlDeviceGetUUID(handle)),
        "name": as_text(pynvml.nvmlDeviceGetName(handle)),
        "memory_total_mib": int(memory.total) // 1024**2,
        "memory_used_mib": int(memory.used) // 1024**2,
        "processes": None if processes is None else [as_process(one) for one in processes[:MAX_PROCESSES]],
    }


def as_process(process: Any) -> dict[str, Any]:
    """A process on a GPU; NVML does not always know its memory."""
    used = process.usedGpuMemory
    return {"pid": int(process.pid), "memory_mib": None if used is None else int(used) // 1024**2}


def read_sensors(handle: Any) -> dict[str, Any]:
    """What only a whole GPU tells."""
    import pynvml

    utilisation = read_value(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    power = read_value(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
    capability = read_value(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    ecc = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    remapped = read_value(lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
    return {
        "utilisation_percent": None if utilisation is None else int(utilisation.gpu),
        "power_w": None if power is None else power / 1000,
        "temperature_c": read_value(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))),
        "capability": None if capability is None else [int(part) for part in capability],
        "ecc_uncorrected": read_value(lambda: int(pynvml.nvmlDeviceGetTotalEccErrors(handle, *ecc))),
        "remap_failed": None if remapped is None else bool(remapped[3]),
    }


def mig_handles(handle: Any) -> list[Any] | None:
    """The MIG devices of a GPU; None when it is not in MIG mode."""
    import pynvml

    mode = read_value(lambda: pynvml.nvmlDeviceGetMigMode(handle))
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    handles = []
    for slot in range(read_value(lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
        try:
            handles.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot))
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            continue
    return handles


def read_gpu(index: int) -> list[dict[str, Any]]:
    """One GPU's reading, or those of its MIG devices; `error` is set where it fails."""
    import pynvml

    common: dict[str, Any] = {"index": index, "error": None, "mig": False, "parent": None}
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        migs = mig_handles(handle)
        sensors = read_sensors(handle)
        if migs is None:
            return [{**common, **read_device(handle), **sensors}]
        uuid = as_text(pynvml.nvmlDeviceGetUUID(handle))
        if not migs:
            return [{**common, **read_device(handle), **sensors, "error": "in MIG mode, without a MIG device"}]
        # How busy a part of a GPU is, NVML does not tell.
        shared = {**common, **sensors, "utilisation_percent": None, "mig": True, "parent": uuid}
        return [{**shared, **read_device(mig)} for mig in migs]
    except pynvml.NVMLError as error:
        return [{**common, "error": str(error)}]


def read_node() -> dict[str, Any]:
    """All GPUs of the node. NVML stays open between readings: opening it wakes idle GPUs."""
    if has_lost_devices():
        return failure(DEVICES_LOST)
    try:
        import pynvml
    except ImportError as error:
        return failure(f"pynvml is missing in the image: {error}")
    try:
        pynvml.nvmlInit()
        gpus = [gpu for index in range(pynvml.nvmlDeviceGetCount()) for gpu in read_gpu(index)]
        return {"driver": as_text(pynvml.nvmlSystemGetDriverVersion()), "error": None, "gpus": gpus}
    except pynvml.NVMLError as error:
        close_nvml()
        return failure(f"NVML: {error}")


def has_lost_devices(path: str = CONTROL_DEVICE) -> bool:
    """Whether the kernel's control group refuses the device; what its file mode refuses is refused to nobody else."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EPERM
    return False


def failure(error: str) -> dict[str, Any]:
    """The reading of a node whose GPUs cannot be read."""
    return {"driver": None, "error": error, "gpus": []}


def close_nvml() -> None:
    """Close NVML as often as it was opened, so that a driver that comes back is found by the next reading."""
    import pynvml

    try:
        while True:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return


def keep_reading(readings: queue.SimpleQueue[dict[str, Any]], period_s: float = PERIOD_S) -> None:
    """Put a reading into the queue again and again; a call of NVML that hangs holds up this thread alone."""
    while True:
        began = time.monotonic()
        readings.put(read_node())
        time.sleep(max(0.1, period_s - (time.monotonic() - began)))


def next_reading(readings: queue.SimpleQueue[dict[str, Any]], hang_s: float = HANG_S) -> dict[str, Any]:
    """The next reading, or that there is none in time."""
    try:
        return readings.get(timeout=hang_s)
    except queue.Empty:
        return failure("NVML does not answer")


def read_boot_id(path: str = BOOT_ID) -> str | None:
    """Differs after each start of the machine; None where the kernel does not tell."""
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123  importing pathlib costs more than it brings
            return file.read().strip()
    except OSError:
        return None


def main() -> None:
    """Print readings until the container is stopped."""
    readings: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=keep_reading, args=(readings,), daemon=True).start()
    boot_id, n = read_boot_id(), 0
    while True:
        n += 1
        line = {"n": n, "boot_id": boot_id, **next_reading(readings)}
        sys.stdout.write(json.dumps(line, separators=(",", ":")) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
