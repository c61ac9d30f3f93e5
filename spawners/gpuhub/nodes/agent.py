"""The GPU agent's script, which runs in one container on each node with Python's standard library and pynvml alone.

Every two seconds it prints one line of JSON, here with line breaks:
`{"n": 7, "boot_id": "0b4f…", "driver": "580.95.05", "disk_free": 81604378624,
"error": null, "gpus": [{"uuid": "GPU-…", "index": 0,
"name": "NVIDIA GeForce RTX 5090", "memory_total_mib": 32607, "memory_used_mib": 4, "utilisation_percent": 0,
"memory_utilisation_percent": 0, "power_w": 12.5, "power_limit_w": 575.0, "energy_mj": 7920310, "temperature_c": 31,
"clocks_event_reasons": 1, "processes": [{"pid": 4711, "memory_mib": 300}], "graphics": [],
"capability": [12, 0], "mig": false,
"parent": null, "ecc_uncorrected": null, "remap_failed": null, "remap_pending": null, "remapped_rows": null,
"pcie": {"generation": 1, "width": 16, "most_generation": 5, "most_width": 16}, "loaded_link": [5, 16],
"is_throttled": false, "error": null}],
"xids": {"GPU-…": [{"code": 31, "count": 1, "at": 1795459261.5}]}}`.
`n` grows by one per line, so that a reader sees without comparing clocks that the agent is alive. `boot_id` is the
machine's, from the kernel. A value that the GPU does not report is null; `error` is NVML's text when a GPU, or NVML
itself, fails. `energy_mj` counts since the driver was loaded, `clocks_event_reasons` is NVML's bit mask,
`remapped_rows` the rows that were replaced after correctable and after uncorrectable errors. `xids` has the Xid errors
of each GPU since the agent's start, with the machine's time of the last one of each code; a GPU whose driver does not
report them is missing there. `loaded_link` is generation and width of the PCIe link under load, null until there was
enough, and `is_throttled` whether the hardware has lowered the clocks for minutes (`GpuHistory`). For a GPU in MIG mode
its MIG devices are listed instead, with its index, and with its UUID as `parent`.
Process ids are the machine's own, at most 32 for each GPU. `disk_free` is the free space for Docker's data, in bytes.
A separate thread reads NVML: if a call does not return, the agent still prints lines, with an error.
On some machines a container loses the right to open its GPUs' devices when systemd is reloaded. Open devices keep
working, this agent's too, so it opens one again for each reading: a right that it has lost, users' containers have lost
as well.
The broker passes this file's text to `python3 -c`, so it imports nothing of gpuhub.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

PERIOD_S = 2.0
#: NVML counts as hanging when no reading is done for this time, seconds.
HANG_S = 6.0
#: Maximum number of processes that are reported for a GPU.
MAX_PROCESSES = 32
#: Maximum number of Xid codes that are counted for a GPU.
MAX_XIDS = 16
#: Xid codes that are counted also beyond that number: after them the GPU needs a reset.
CRITICAL_XIDS = (48, 62, 64, 74, 79, 95, 119, 120)
#: Bits of the clocks' event reasons that the hardware sets: slowdown, too hot, power brake.
HARDWARE_SLOWDOWN = 0x08 | 0x40 | 0x80
#: Readings in which a GPU must be slowed down for half of the time to count as throttled: five minutes.
THROTTLE_READINGS = 150
#: Use from which on a GPU is under load, percent, and readings under load that show its link.
LOAD_PERCENT = 50
LINK_READINGS = 30
#: Paths on Docker's disks: the container's layers, and a file that Docker mounts from its own folder.
DISKS = ("/", "/etc/hostname")
BOOT_ID = "/proc/sys/kernel/random/boot_id"
#: The driver's own device, which every container with a GPU has; opening it does not wake GPUs.
CONTROL_DEVICE = "/dev/nvidiactl"
DEVICES_LOST = "containers there have lost the right to open their GPUs"


def read_value(read: Callable[[], Any]) -> Any:
    """Return the value, or None if the GPU has no such sensor; other NVML errors are raised."""
    import pynvml

    try:
        return read()
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission):
        return None


def decode_text(value: Any) -> str:
    """Return text: NVML bindings return bytes or text, depending on their version."""
    return value.decode() if isinstance(value, bytes) else str(value)


def read_memory_and_processes(handle: Any) -> dict[str, Any]:
    """Read the values that GPUs and MIG devices have in common."""
    import pynvml

    # Version 2 excludes the driver's own memory, hundreds of MiB on large cards; older drivers count it as used.
    memory = read_value(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2))
    if memory is None:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    processes = read_value(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    # Processes of the screen: Xorg, gnome-shell, browsers, games.
    graphics = read_value(lambda: pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle))
    return {
        "uuid": decode_text(pynvml.nvmlDeviceGetUUID(handle)),
        "name": decode_text(pynvml.nvmlDeviceGetName(handle)),
        "memory_total_mib": int(memory.total) // 1024**2,
        "memory_used_mib": int(memory.used) // 1024**2,
        "processes": None if processes is None else [build_process(process) for process in processes[:MAX_PROCESSES]],
        "graphics": None if graphics is None else [build_process(process) for process in graphics[:MAX_PROCESSES]],
    }


def build_process(process: Any) -> dict[str, Any]:
    """Describe a process on a GPU; NVML does not always report its memory."""
    used = process.usedGpuMemory
    return {"pid": int(process.pid), "memory_mib": None if used is None else int(used) // 1024**2}


def read_sensors(handle: Any) -> dict[str, Any]:
    """Read the values that only a whole GPU has."""
    import pynvml

    utilisation = read_value(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    power = read_value(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
    power_limit = read_value(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    capability = read_value(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    ecc = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    remapped = read_value(lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
    return {
        "utilisation_percent": None if utilisation is None else int(utilisation.gpu),
        "memory_utilisation_percent": None if utilisation is None else int(utilisation.memory),
        "power_w": None if power is None else power / 1000,
        "power_limit_w": None if power_limit is None else power_limit / 1000,
        "energy_mj": read_value(lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))),
        "clocks_event_reasons": read_value(lambda: int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))),
        "temperature_c": read_value(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))),
        "capability": None if capability is None else [int(part) for part in capability],
        "ecc_uncorrected": read_value(lambda: int(pynvml.nvmlDeviceGetTotalEccErrors(handle, *ecc))),
        "remap_failed": None if remapped is None else bool(remapped[3]),
        "remap_pending": None if remapped is None else bool(remapped[2]),
        "remapped_rows": None if remapped is None else [int(rows) for rows in remapped[:2]],
        "pcie": read_pcie(handle),
    }


def read_pcie(handle: Any) -> dict[str, int] | None:
    """Read the PCIe link, which idle GPUs slow down, and the most that card and slot can; None where not reported."""
    import pynvml

    values = {
        "generation": read_value(lambda: pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
        "width": read_value(lambda: pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        "most_generation": read_value(lambda: pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        "most_width": read_value(lambda: pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    }
    known = {name: int(value) for name, value in values.items() if value}
    return known if len(known) == len(values) else None


def list_mig_devices(handle: Any) -> list[Any] | None:
    """Return the MIG devices of a GPU, or None if it is not in MIG mode."""
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
    """Read one GPU, or its MIG devices; a failure is in `error`."""
    import pynvml

    common: dict[str, Any] = {"index": index, "error": None, "mig": False, "parent": None}
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        migs = list_mig_devices(handle)
        sensors = read_sensors(handle)
        if migs is None:
            return [{**common, **read_memory_and_processes(handle), **sensors}]
        uuid = decode_text(pynvml.nvmlDeviceGetUUID(handle))
        if not migs:
            return [
                {**common, **read_memory_and_processes(handle), **sensors, "error": "in MIG mode, without a MIG device"}
            ]
        # NVML does not report the utilisation of a MIG device.
        unknown = {"utilisation_percent": None, "memory_utilisation_percent": None}
        shared = {**common, **sensors, **unknown, "mig": True, "parent": uuid}
        return [{**shared, **read_memory_and_processes(mig)} for mig in migs]
    except pynvml.NVMLError as error:
        return [{**common, "error": str(error)}]


def read_node() -> dict[str, Any]:
    """Read all GPUs of the node. NVML stays open between readings, because opening it wakes idle GPUs."""
    if has_lost_devices():
        return build_failure(DEVICES_LOST)
    try:
        import pynvml
    except ImportError as error:
        return build_failure(f"pynvml is missing in the image: {error}")
    try:
        pynvml.nvmlInit()
        gpus = [gpu for index in range(pynvml.nvmlDeviceGetCount()) for gpu in read_gpu(index)]
        return {"driver": decode_text(pynvml.nvmlSystemGetDriverVersion()), "error": None, "gpus": gpus}
    except pynvml.NVMLError as error:
        close_nvml()
        return build_failure(f"NVML: {error}")


class XidCounter:
    """Counts the Xid errors of every GPU since the agent's start; a GPU that is lost by one of them is counted too."""

    def __init__(self) -> None:
        #: NVML's set of events; None where NVML was closed.
        self._events: Any = None
        #: UUID of each GPU in the set, by the address of NVML's handle: a lost GPU no longer reports its UUID.
        self._watched: dict[int, str] = {}
        #: Count and time of the last error, by UUID and code.
        self._seen: dict[str, dict[int, tuple[int, float]]] = {}

    def add_to(self, node: dict[str, Any]) -> None:
        """Add the errors to the reading of a node, for every GPU whose driver reports them."""
        if node["error"] is not None:
            # A failed reading has closed NVML, and its set of events with it.
            self._events, self._watched = None, {}
            return
        uuids = {gpu["parent"] or gpu["uuid"] for gpu in node["gpus"] if "uuid" in gpu}
        self._watch(uuids - set(self._watched.values()))
        self._collect()
        node["xids"] = {uuid: self._list_errors(uuid) for uuid in self._watched.values()}

    def _watch(self, uuids: set[str]) -> None:
        import pynvml

        for uuid in sorted(uuids):
            try:
                self._events = self._events or pynvml.nvmlEventSetCreate()
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                # Drivers support different kinds of events; the GPU's other values are read all the same.
                if not pynvml.nvmlDeviceGetSupportedEventTypes(handle) & pynvml.nvmlEventTypeXidCriticalError:
                    continue
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
            except pynvml.NVMLError:
                continue
            self._watched[read_address(handle)] = uuid

    def _collect(self) -> None:
        """Count the errors that have occurred, at most as many as one reading may take."""
        import pynvml

        for _ in range(MAX_XIDS if self._watched else 0):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError:
                return
            seen = self._seen.setdefault(self._watched.get(read_address(event.device), ""), {})
            code = int(event.eventData)
            if code in seen or code in CRITICAL_XIDS or len(seen) < MAX_XIDS:
                seen[code] = seen.get(code, (0, 0.0))[0] + 1, time.time()

    def _list_errors(self, uuid: str) -> list[dict[str, Any]]:
        seen = self._seen.get(uuid, {})
        return [{"code": code, "count": count, "at": at} for code, (count, at) in sorted(seen.items())]


class GpuHistory:
    """Judges by many readings what one cannot show: the PCIe link under load, and clocks that stay low.

    One reading shows a link that is slow for an instant, and a card that cools down between two steps.
    """

    def __init__(self) -> None:
        self._links: dict[str, deque[tuple[int, int]]] = {}
        self._slowdowns: dict[str, deque[bool]] = {}
        self._throttled: set[str] = set()

    def add_to(self, node: dict[str, Any]) -> None:
        """Store the reading of a node, and add what its GPUs have shown so far."""
        present = {gpu["parent"] or gpu["uuid"]: gpu for gpu in node["gpus"] if "uuid" in gpu}
        if node["error"] is None:
            for known in (self._links, self._slowdowns):
                for uuid in set(known) - set(present):
                    del known[uuid]
            self._throttled &= set(present)
        for uuid, gpu in present.items():
            self._add_link(uuid, gpu)
            self._add_slowdown(uuid, gpu["clocks_event_reasons"])
        for gpu in node["gpus"]:
            if "uuid" in gpu:
                uuid = gpu["parent"] or gpu["uuid"]
                gpu["loaded_link"] = self._find_link(uuid)
                gpu["is_throttled"] = uuid in self._throttled

    def _add_link(self, uuid: str, gpu: dict[str, Any]) -> None:
        if gpu["pcie"] is not None and (gpu["utilisation_percent"] or 0) >= LOAD_PERCENT:
            links = self._links.setdefault(uuid, deque(maxlen=LINK_READINGS))
            links.append((gpu["pcie"]["generation"], gpu["pcie"]["width"]))

    def _find_link(self, uuid: str) -> list[int] | None:
        links = self._links.get(uuid, ())
        if len(links) < LINK_READINGS:
            return None
        return [max(generation for generation, _ in links), max(width for _, width in links)]

    def _add_slowdown(self, uuid: str, reasons: int | None) -> None:
        slowdowns = self._slowdowns.setdefault(uuid, deque(maxlen=THROTTLE_READINGS))
        slowdowns.append(bool((reasons or 0) & HARDWARE_SLOWDOWN))
        if sum(slowdowns) >= THROTTLE_READINGS // 2:
            self._throttled.add(uuid)
        elif not any(slowdowns):
            self._throttled.discard(uuid)


def read_address(handle: Any) -> int:
    """Return the address of NVML's handle of a GPU, which stays the same while NVML is open."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def read_disk_free(paths: tuple[str, ...] = DISKS) -> int:
    """Return the free space on the fuller one of Docker's disks, without what is reserved for root, in bytes."""
    spaces = [os.statvfs(path) for path in paths]
    return min(space.f_bavail * space.f_frsize for space in spaces)


def has_lost_devices(path: str = CONTROL_DEVICE) -> bool:
    """Return whether the kernel's control group refuses the device. Its file mode concerns only this agent's user."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EPERM
    return False


def build_failure(error: str) -> dict[str, Any]:
    """Return the reading of a node whose GPUs cannot be read."""
    return {"driver": None, "error": error, "gpus": []}


def close_nvml() -> None:
    """Close NVML as often as it was opened, so that the next reading finds a driver that is back."""
    import pynvml

    try:
        while True:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return


def read_repeatedly(readings: queue.SimpleQueue[dict[str, Any]], period_s: float = PERIOD_S) -> None:
    """Put a reading into the queue periodically; a hanging call of NVML blocks only this thread."""
    xids, history = XidCounter(), GpuHistory()
    while True:
        began = time.monotonic()
        reading = read_node()
        xids.add_to(reading)
        history.add_to(reading)
        readings.put({"disk_free": read_disk_free(), **reading})
        time.sleep(max(0.1, period_s - (time.monotonic() - began)))


def next_reading(readings: queue.SimpleQueue[dict[str, Any]], hang_s: float = HANG_S) -> dict[str, Any]:
    """Return the next reading, or a failure if there is none in time."""
    try:
        return readings.get(timeout=hang_s)
    except queue.Empty:
        return build_failure("NVML does not answer")


def read_boot_id(path: str = BOOT_ID) -> str | None:
    """Return the id of the machine's current boot, or None if the kernel does not report one."""
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123  importing pathlib costs more than it brings
            return file.read().strip()
    except OSError:
        return None


def main() -> None:
    """Print readings until the container is stopped."""
    readings: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=read_repeatedly, args=(readings,), daemon=True).start()
    boot_id, n = read_boot_id(), 0
    while True:
        n += 1
        line = {"n": n, "boot_id": boot_id, **next_reading(readings)}
        sys.stdout.write(json.dumps(line, separators=(",", ":")) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
