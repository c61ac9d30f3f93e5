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
from gpuhub.nodes.status import AgentReading, GpuProcess, NodeStatus, PcieLink, XidErrors, find_power_limits
from gpuhub.ops.doctor.node_facts import build_gpu_report
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
        "GraphicsRunningProcesses",
        "CurrPcieLinkWidth",
    ):
        nvml.change(f"nvmlDeviceGet{function}", pynvml.NVMLError_NotSupported)
    unknown = dict.fromkeys(
        (
            "ecc_uncorrected",
            "remap_failed",
            "remap_pending",
            "remapped_rows",
            "pcie",
            "power_w",
            "power_limit_w",
            "energy_mj",
            "clocks_event_reasons",
            "processes",
            "graphics",
        )
    )
    recorded = load(name)["read_node"]
    assert agent.read_node() == {**recorded, "gpus": [{**gpu, **unknown} for gpu in recorded["gpus"]]}


def test_programs_that_draw_are_apart_from_those_that_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML has a list of each, whose entries have one form: the recorded one, here as if it had been drawing."""
    nvml = Replay(BUSY)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    recorded = load(BUSY)["calls"]
    computing = recorded['nvmlDeviceGetComputeRunningProcesses("GPU 0")']
    # Without a screen, the list was empty on this machine.
    assert recorded['nvmlDeviceGetGraphicsRunningProcesses("GPU 0")'] == {"result": {"list": []}}
    nvml.change("nvmlDeviceGetGraphicsRunningProcesses", computing["result"])
    first = agent.read_node()["gpus"][0]
    assert first["graphics"] == first["processes"] == [{"pid": 1176, "memory_mib": 1634}]
    reading = parse_agent_line(json.dumps({"n": 1, "boot_id": "b", **agent.read_node()}).encode())
    assert reading is not None
    assert reading.gpus[0].graphics == (GpuProcess(pid=1176, memory_mib=1634),)


def test_line_of_an_agent_that_knows_no_graphics_is_read() -> None:
    """An agent of an earlier image runs on until it is replaced."""
    node = load(BUSY)["read_node"]
    older = {**node, "gpus": [{key: value for key, value in gpu.items() if key != "graphics"} for gpu in node["gpus"]]}
    reading = parse_agent_line(json.dumps({"n": 1, "boot_id": "b", **older}).encode())
    assert reading is not None
    assert [gpu.graphics for gpu in reading.gpus] == [None, None]


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


def test_link_counts_only_when_readings_under_load_have_shown_it(replay: tuple[str, Replay]) -> None:
    """The best of the last readings with load: a link that is slow for an instant is not a slow link."""
    _, nvml = replay
    history = agent.GpuHistory()

    def read(use: int, width: int) -> list[int] | None:
        nvml.change("nvmlDeviceGetUtilizationRates", {"struct": {"gpu": use, "memory": 0}})
        nvml.change("nvmlDeviceGetCurrPcieLinkWidth", width)
        node = agent.read_node()
        history.add_to(node)
        link: list[int] | None = node["gpus"][0]["loaded_link"]
        return link

    assert {str(read(0, 1)) for _ in range(agent.LINK_READINGS)} == {"None"}
    assert {str(read(90, 16)) for _ in range(agent.LINK_READINGS - 1)} == {"None"}
    assert read(90, 4) == [5, 16]
    assert read(0, 1) == [5, 16]
    assert [read(90, 4) for _ in range(agent.LINK_READINGS)][-1] == [5, 4]


def test_clocks_that_stay_low_count_until_they_were_normal_for_as_long(replay: tuple[str, Replay]) -> None:
    """Software's limits, such as the power cap of every busy card, are no slowdown by the hardware."""
    _, nvml = replay
    history = agent.GpuHistory()

    def read(reasons: int) -> bool:
        nvml.change("nvmlDeviceGetCurrentClocksEventReasons", reasons)
        node = agent.read_node()
        history.add_to(node)
        return bool(node["gpus"][1]["is_throttled"])

    half = agent.THROTTLE_READINGS // 2
    assert not any(read(0x04 | 0x20) for _ in range(half))
    assert not any(read(0x48) for _ in range(half - 1))
    assert read(0x80)
    assert all(read(0) for _ in range(agent.THROTTLE_READINGS - 1))
    assert not read(0)


def test_gpu_without_xid_events_is_read_and_named(replay: tuple[str, Replay]) -> None:
    """It is missing among the GPUs whose errors are reported."""
    _, nvml = replay
    nvml.change("nvmlDeviceGetSupportedEventTypes", 0)
    counter, node = agent.XidCounter(), agent.read_node()
    nvml.nvmlEventSetCreate = object  # type: ignore[attr-defined]
    counter.add_to(node)
    assert (node["xids"], node["error"], len(node["gpus"])) == ({}, None, 2)
    line = json.dumps({"n": 1, "boot_id": None, **node}).encode()
    warnings = build_gpu_report(parse_agent_line(line) or AgentReading(line_number=0, error=None, gpus=())).gpu_warnings
    assert [text for text, _ in warnings] == [
        f"GPU {index} (NVIDIA H200): its driver reports no Xid errors".replace("NVIDIA ", "") for index in range(2)
    ]


def test_link_and_slowdown_reach_the_nodes_record(replay: tuple[str, Replay]) -> None:
    line = {"n": 1, "boot_id": None, **agent.read_node()}
    line["gpus"][0] |= {"loaded_link": [4, 8], "is_throttled": True, "remap_pending": True}
    first, second = read_line(line).gpus
    assert (first.loaded_link, first.link_limit) == (PcieLink(generation=4, width=8), PcieLink(generation=5, width=16))
    assert (first.is_throttled, first.remap_pending) == (True, True)
    assert (second.loaded_link, second.is_throttled, second.remap_pending) == (None, False, False)


def read_line(line: dict[str, Any]) -> AgentReading:
    reading = parse_agent_line(json.dumps(line).encode())
    assert reading is not None
    return reading
