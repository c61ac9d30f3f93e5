"""Records what NVML answers on this machine: `python3 -m tests.support.nvml.recorder FILE`.

It runs the product's own readers of NVML on the real driver, with the real nvidia-ml-py in between, and keeps every call
with its result or its error, so that no test has to invent an answer. `replay.py` answers from the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pynvml

#: Calls that no reader makes yet, each of which takes one device: for what is to be built on them.
FURTHER = (
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetMemoryBusWidth",
    "nvmlDeviceGetNumGpuCores",
    "nvmlDeviceGetPowerManagementLimitConstraints",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceGetFanSpeed",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetDisplayActive",
    "nvmlDeviceGetGraphicsRunningProcesses",
)


class Recorder(ModuleType):
    """Stands in for the module pynvml, passes every call on to the real one, and keeps it."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        #: Call, as `describe_call` writes it → `{"result": …}` or `{"error": name of the exception}`.
        self.calls: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(pynvml, name)
        return self._wrap(name, found) if name.startswith("nvml") and callable(found) else found

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            text = describe_call(name, [self._name(each) for each in arguments], keywords)
            try:
                result = function(*arguments, **keywords)
            except (pynvml.NVMLError, ctypes.ArgumentError) as error:
                self.calls[text] = {"error": type(error).__name__}
                raise
            if is_handle(result):
                handle = f"GPU {pynvml.nvmlDeviceGetIndex(result)}"
                self._names[ctypes.cast(result, ctypes.c_void_p).value or 0] = handle
                self.calls[text] = {"handle": handle}
            else:
                self.calls[text] = {"result": encode(result)}
            return result

        return call

    def _name(self, argument: Any) -> Any:
        if is_handle(argument):
            return self._names[ctypes.cast(argument, ctypes.c_void_p).value or 0]
        return encode(argument)


def is_handle(value: Any) -> bool:
    """Return whether a value is one of NVML's pointers to a device or a set of events."""
    return isinstance(value, ctypes._Pointer)


def describe_call(name: str, arguments: list[Any], keywords: dict[str, Any]) -> str:
    """Return a call as one line; a handle is written as `GPU` with NVML's index."""
    words = [json.dumps(each) for each in arguments] + [f"{key}={value}" for key, value in sorted(keywords.items())]
    return f"{name}({', '.join(words)})"


def encode(value: Any) -> Any:
    """Return a value of pynvml as JSON; structures become objects, bytes objects with the key `bytes`."""
    if isinstance(value, ctypes.Structure):
        fields = [field[0] for field in type(value)._fields_]
        return {"struct": {field: encode(getattr(value, field)) for field in fields}}
    if isinstance(value, bytes):
        return {"bytes": value.decode("utf-8", "backslashreplace")}
    if isinstance(value, ctypes.Array | list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [encode(each) for each in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "__dict__"):
        return {"struct": {key: encode(each) for key, each in vars(value).items()}}
    return {"repr": repr(value)}


def record() -> dict[str, Any]:
    """Run the product's readers, then the further calls, and return everything that NVML answered."""
    recorder = Recorder()
    sys.modules["pynvml"] = recorder
    from gpu_launch.worker import gpu_monitor, nccl_env
    from gpuhub.nodes import agent

    reading = agent.read_node()
    handles = [recorder.nvmlDeviceGetHandleByIndex(index) for index in range(recorder.nvmlDeviceGetCount())]
    uuids = [agent.decode_text(recorder.nvmlDeviceGetUUID(handle)) for handle in handles]
    monitored = [gpu_monitor._read_gpu(recorder, handle) for handle in gpu_monitor._open_handles(recorder, uuids)]
    has_p2p = nccl_env._has_p2p(tuple(uuids))
    recorder.nvmlInit()
    for handle in handles:
        # As older drivers are asked.
        recorder.nvmlDeviceGetMemoryInfo(handle)
        for name in FURTHER:
            with contextlib.suppress(pynvml.NVMLError):
                getattr(recorder, name)(handle)
    for first, second in itertools.permutations(handles, 2):
        with contextlib.suppress(pynvml.NVMLError):
            recorder.nvmlDeviceGetTopologyCommonAncestor(first, second)
        for capability in range(pynvml.NVML_P2P_CAPS_INDEX_UNKNOWN):
            with contextlib.suppress(pynvml.NVMLError):
                recorder.nvmlDeviceGetP2PStatus(first, second, capability)
    recorder.nvmlShutdown()
    return {
        "about": {
            "machine": f"{len(handles)} × {reading['gpus'][0]['name']}, driver {reading['driver']}",
            "kernel": platform.release(),
            "nvidia-ml-py": version("nvidia-ml-py"),
        },
        "read_node": reading,
        "monitored": monitored,
        "has_p2p": has_p2p,
        "calls": recorder.calls,
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(record(), indent=1) + os.linesep, encoding="utf-8")
