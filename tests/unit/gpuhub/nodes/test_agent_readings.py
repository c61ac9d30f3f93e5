"""The GPU agent on what real drivers answered."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pynvml
import pytest

from gpuhub.nodes import agent
from gpuhub.nodes.agent_container import parse_agent_line
from gpuhub.nodes.status import AgentReading, find_power_limits
from tests.support.nvml.replay import BUSY, IDLE, Replay, load


@pytest.fixture(params=[IDLE, BUSY])
def replay(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Replay]:
    nvml = Replay(request.param)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return request.param, nvml


def test_reading_is_that_of_the_recorded_machine(replay: tuple[str, Replay]) -> None:
    """Memory is without the driver's own, and processes have the machine's ids."""
    name, _ = replay
    assert agent.read_node() == load(name)["read_node"]


def test_gpu_without_further_sensors_is_read(replay: tuple[str, Replay]) -> None:
    """Many GPUs have no ECC, rows to remap, MIG or power sensor; their other values are there."""
    name, nvml = replay
    for function in (
        "TotalEccErrors",
        "RemappedRows",
        "MigMode",
        "PowerUsage",
        "EnforcedPowerLimit",
        "ComputeRunningProcesses",
    ):
        nvml.change(f"nvmlDeviceGet{function}", pynvml.NVMLError_NotSupported)
    unknown = dict.fromkeys(("ecc_uncorrected", "remap_failed", "power_w", "power_limit_w", "processes"))
    recorded = load(name)["read_node"]
    assert agent.read_node() == {**recorded, "gpus": [{**gpu, **unknown} for gpu in recorded["gpus"]]}


def test_older_driver_counts_its_own_memory_as_used(replay: tuple[str, Replay]) -> None:
    """It does not know the second version of the call; the total is the same."""
    name, nvml = replay
    real = nvml._answers
    for call in [call for call in real if "version=" in call]:
        real[call] = {"error": "NVMLError_FunctionNotFound"}
    before = load(name)["read_node"]["gpus"]
    after = agent.read_node()["gpus"]
    assert [gpu["memory_total_mib"] for gpu in after] == [gpu["memory_total_mib"] for gpu in before]
    reserved = [a["memory_used_mib"] - b["memory_used_mib"] for a, b in zip(after, before, strict=True)]
    assert all(600 < mib < 640 for mib in reserved), reserved


def test_lost_gpu_does_not_hide_the_others(replay: tuple[str, Replay]) -> None:
    name, nvml = replay
    nvml._answers['nvmlDeviceGetUtilizationRates("GPU 0")'] = {"error": "NVMLError_GpuIsLost"}
    first, second = agent.read_node()["gpus"]
    assert (first["error"], "uuid" in first) == ("GPU is lost", False)
    assert second == load(name)["read_node"]["gpus"][1]


def test_power_limit_reaches_the_nodes_record(replay: tuple[str, Replay]) -> None:
    """In watts, as the recorded driver enforces it; MIG devices share their GPU's."""
    line = {"n": 1, "boot_id": None, **agent.read_node()}
    gpus = read_line(line).gpus
    assert find_power_limits(gpus) == {0: 700.0, 1: 700.0}
    mig = [replace(gpus[0], uuid=f"MIG-{part}", is_mig=True, parent=gpus[0].uuid) for part in range(2)]
    assert find_power_limits([*mig, gpus[1]]) == {0: 700.0, 1: 700.0}


@pytest.mark.parametrize("limit", [None, 0, -1.0, 10_001, "700", True])
def test_impossible_power_limit_counts_as_not_reported(replay: tuple[str, Replay], limit: object) -> None:
    line = {"n": 1, "boot_id": None, **agent.read_node()}
    line["gpus"][0]["power_limit_w"] = limit
    assert find_power_limits(read_line(line).gpus) == {0: None, 1: 700.0}


def read_line(line: dict[str, Any]) -> AgentReading:
    reading = parse_agent_line(json.dumps(line).encode())
    assert reading is not None
    return reading
