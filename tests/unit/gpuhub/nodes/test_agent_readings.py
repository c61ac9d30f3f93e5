"""The GPU agent on what real drivers answered."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pynvml
import pytest

from gpuhub.nodes import agent
from gpuhub.nodes.agent_container import parse_agent_line, record_agent_reading
from gpuhub.nodes.status import AgentReading, NodeStatus, XidErrors, find_power_limits
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
        "TotalEnergyConsumption",
        "CurrentClocksEventReasons",
        "TotalEccErrors",
        "RemappedRows",
        "MigMode",
        "PowerUsage",
        "EnforcedPowerLimit",
        "ComputeRunningProcesses",
    ):
        nvml.change(f"nvmlDeviceGet{function}", pynvml.NVMLError_NotSupported)
    unknown = dict.fromkeys(
        (
            "ecc_uncorrected",
            "remap_failed",
            "remapped_rows",
            "power_w",
            "power_limit_w",
            "energy_mj",
            "clocks_event_reasons",
            "processes",
        )
    )
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


def test_counters_reach_the_nodes_record(replay: tuple[str, Replay]) -> None:
    """Energy is in millijoules, and Xid errors are those of each GPU; a line without them changes nothing."""
    name, _ = replay
    recorded = load(name)["read_node"]["gpus"]
    line = {"n": 1, "boot_id": None, **agent.read_node()}
    uuid = recorded[0]["uuid"]
    line["xids"] = {uuid: [{"code": 79, "count": 2, "at": 5.5}], recorded[1]["uuid"]: []}
    first = read_line(line)
    assert [gpu.energy_mj for gpu in first.gpus] == [gpu["energy_mj"] for gpu in recorded]
    assert [gpu.clocks_event_reasons for gpu in first.gpus] == [gpu["clocks_event_reasons"] for gpu in recorded]
    assert [gpu.remapped_rows for gpu in first.gpus] == [(0, 0), (0, 0)]
    node = record_agent_reading(NodeStatus(name="rig1"), first, 10.0)
    assert node.xids == {uuid: (XidErrors(code=79, count=2, last_at=5.5),), recorded[1]["uuid"]: ()}
    failed = read_line({"n": 2, "boot_id": None, **agent.build_failure("NVML: Unknown Error")})
    assert record_agent_reading(node, failed, 12.0).xids == node.xids


def read_line(line: dict[str, Any]) -> AgentReading:
    reading = parse_agent_line(json.dumps(line).encode())
    assert reading is not None
    return reading
