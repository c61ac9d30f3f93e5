"""Metrics of GPUs from readings: DCGM's names and units, and what has none."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.broker.metrics.gpu_metrics import FIELDS, collect_gpus
from gpuhub.nodes.status import GpuFault, GpuReading, NodeStatus, PcieLink, XidErrors
from tests.support.broker.metrics import Metrics

NOW = 1000.0
LABELS = {"gpu": "0", "UUID": "GPU-a", "device": "nvidia0", "modelName": "RTX 5090", "Hostname": "rig1"}


def read_gpu(**changes: Any) -> GpuReading:
    values = {
        "uuid": "GPU-a", "index": 0, "model": "RTX 5090", "memory_mib": 32607, "utilisation_percent": 73,
        "memory_utilisation_percent": 20, "memory_used_mib": 20000, "energy_mj": 7_920_310, "power_w": 412.5,
        "power_limit_w": 575.0, "temperature_c": 61, "clocks_event_reasons": 0x44, "ecc_uncorrected": 0,
        "remap_failed": False, "remapped_rows": (3, 1), "remap_pending": True,
        "link": PcieLink(generation=1, width=8), "link_limit": PcieLink(generation=5, width=16),
    }  # fmt: skip
    return GpuReading(**{**values, **changes})


def collect(*gpus: GpuReading, **changes: Any) -> Metrics:
    node = NodeStatus(name="rig1", is_up=True, gpus=gpus, read_at=NOW, has_readings=True).evolve(**changes)
    return Metrics(collect_gpus({"rig1": node}, (), NOW))


def test_values_have_names_and_units_of_dcgm() -> None:
    """Percent, MiB, watts, degrees Celsius and millijoules; the labels are those of DCGM's exporter."""
    metrics = collect(read_gpu())
    assert {field.name: metrics.value(f"DCGM_FI_DEV_{field.name}", **LABELS) for field in FIELDS} == {
        "GPU_UTIL": 73,
        "MEM_COPY_UTIL": 20,
        "FB_USED": 20000,
        "FB_FREE": 12607,
        "FB_TOTAL": 32607,
        "POWER_USAGE": 412.5,
        "ENFORCED_POWER_LIMIT": 575.0,
        "TOTAL_ENERGY_CONSUMPTION": 7_920_310,
        "GPU_TEMP": 61,
        "CLOCKS_EVENT_REASONS": 0x44,
        "ECC_DBE_VOL_TOTAL": 0,
        "CORRECTABLE_REMAPPED_ROWS": 3,
        "UNCORRECTABLE_REMAPPED_ROWS": 1,
        "ROW_REMAP_FAILURE": 0,
        "ROW_REMAP_PENDING": 1,
        "PCIE_LINK_GEN": 1,
        "PCIE_LINK_WIDTH": 8,
        "PCIE_MAX_LINK_GEN": 5,
        "PCIE_MAX_LINK_WIDTH": 16,
    }
    assert metrics.list("DCGM_FI_DEV_GPU_UTIL") == [LABELS]


def test_reasons_for_low_clocks_are_separate_series() -> None:
    metrics = collect(read_gpu())
    throttled = {labels["reason"] for labels in metrics.list("gpuhub_gpu_throttled", UUID="GPU-a", model="RTX 5090")}
    assert throttled == {
        "sw_power_cap",
        "hw_slowdown",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
    }
    assert {reason for reason in throttled if metrics.value("gpuhub_gpu_throttled", reason=reason)} == {
        "sw_power_cap",
        "hw_thermal_slowdown",
    }


def test_sensors_that_a_gpu_lacks_have_no_series() -> None:
    """Zero would be a measured value."""
    metrics = collect(GpuReading(uuid="GPU-a", index=0, model="RTX 5090", memory_mib=32607))
    assert {name for name in metrics.names if name.startswith("DCGM")} == {"DCGM_FI_DEV_FB_TOTAL"}
    assert metrics.list("gpuhub_gpu_throttled") == []


@pytest.mark.parametrize("changes", [{"is_up": False}, {"gpu_error": "NVML: Unknown Error"}, {"read_at": NOW - 16}])
def test_old_readings_have_no_series(changes: dict[str, Any]) -> None:
    """A node that is not read would otherwise seem to continue with the same load."""
    assert collect(read_gpu(), **changes).names == set()
    assert collect(read_gpu()).names


def test_failed_gpu_has_no_values() -> None:
    assert collect(read_gpu(error="GPU is lost")).names == set()


def test_mig_devices_share_their_gpus_sensors() -> None:
    """Memory is that of each device; power and temperature are the whole GPU's, once."""
    parts = [
        read_gpu(uuid=f"MIG-{n}", model="H200 MIG 1g.18gb", parent="GPU-a", is_mig=True, memory_used_mib=n)
        for n in range(2)
    ]
    metrics = collect(*parts)
    assert [labels["UUID"] for labels in metrics.list("DCGM_FI_DEV_FB_USED")] == ["MIG-0", "MIG-1"]
    assert [labels["UUID"] for labels in metrics.list("DCGM_FI_DEV_POWER_USAGE")] == ["GPU-a"]
    assert metrics.list("DCGM_FI_DEV_POWER_USAGE")[0]["modelName"] == "H200"


def test_faults_have_kind_and_code() -> None:
    """Also those of a GPU that cannot be read."""
    common = {"gpu": "GPU-a", "node": "rig1", "occurred_at": 1.0, "noticed_at": 2.0, "boot_id": None, "text": "…"}
    faults = tuple(GpuFault(kind=kind, code=code, **common) for kind, code in (("xid", 79), ("link", 0)))
    metrics = collect(read_gpu(error="GPU is lost"), faults={"GPU-a": faults})
    shown = {(labels["kind"], labels["code"]) for labels in metrics.list("gpuhub_gpu_fault", UUID="GPU-a")}
    assert shown == {("xid", "79"), ("link", "0")}


def test_xid_errors_have_code_count_and_time() -> None:
    """Also of a GPU that was lost by one; the last code is DCGM's value, 0 for none."""
    errors = (XidErrors(code=79, count=1, last_at=500.0), XidErrors(code=31, count=4, last_at=400.0))
    lost = read_gpu(error="GPU is lost")
    other = read_gpu(uuid="GPU-b", index=1)
    metrics = collect(lost, other, xids={"GPU-a": errors, "GPU-b": ()})
    assert metrics.value("DCGM_FI_DEV_XID_ERRORS", UUID="GPU-a") == 79
    assert metrics.value("DCGM_FI_DEV_XID_ERRORS", UUID="GPU-b") == 0
    assert metrics.value("gpuhub_gpu_xid_errors_total", UUID="GPU-a", xid="31") == 4
    assert metrics.value("gpuhub_gpu_xid_last_timestamp_seconds", UUID="GPU-a", xid="79") == 500.0
    assert metrics.list("gpuhub_gpu_xid_errors_total", UUID="GPU-b") == []


def test_gpu_whose_driver_reports_no_errors_has_no_series() -> None:
    assert collect(read_gpu()).list("DCGM_FI_DEV_XID_ERRORS") == []
