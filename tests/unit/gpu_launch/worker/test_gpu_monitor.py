"""What the notebook shows of a launch's GPUs, on what real drivers answered."""

from __future__ import annotations

import sys

import pynvml
import pytest

from gpu_launch.worker import gpu_monitor
from tests.support.nvml.replay import BUSY, IDLE, Replay, load


@pytest.mark.parametrize("name", [IDLE, BUSY])
def test_reading_agrees_with_the_agent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook and the GPU page show one memory in use."""
    nvml = Replay(name)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    recorded = load(name)
    uuids = [gpu["uuid"] for gpu in recorded["read_node"]["gpus"]]
    found = [gpu_monitor._read_gpu(nvml, handle) for handle in gpu_monitor._open_handles(nvml, uuids)]
    assert found == recorded["monitored"]
    assert [gpu["memory_mib"] for gpu in found] == [gpu["memory_used_mib"] for gpu in recorded["read_node"]["gpus"]]


def test_values_that_nvml_does_not_know_are_none() -> None:
    nvml = Replay(IDLE)
    nvml.change("nvmlDeviceGetPowerUsage", pynvml.NVMLError_NotSupported)
    nvml.change("nvmlDeviceGetMemoryInfo", pynvml.NVMLError_Unknown)
    found = gpu_monitor._read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(1))
    unknown = dict.fromkeys(("power_w", "memory_mib", "memory_total_mib"))
    assert found == {**load(IDLE)["monitored"][1], **unknown}
