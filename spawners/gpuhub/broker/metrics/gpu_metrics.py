"""Metrics of GPUs. What DCGM measures has its names, units and labels; the other names begin with `gpuhub_gpu_`.

All values are those of the last reading of the node's GPU agent. A GPU that cannot be read has a state and no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.metrics_core import Metric

from gpuhub.broker_api.schemas import GpuState, NodeView
from gpuhub.nodes.status import GpuReading, NodeStatus

#: DCGM's labels, as its exporter has them.
DCGM_LABELS = ("gpu", "UUID", "device", "modelName", "Hostname")
#: Labels of gpuhub's own metrics of GPUs, by which they can be joined with DCGM's.
LABELS = ("gpu", "UUID", "model", "Hostname")
#: Bits of NVML's clocks event reasons that slow a GPU down.
THROTTLE_REASONS = {
    "sw_power_cap": 0x04,
    "hw_slowdown": 0x08,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}


@dataclass(frozen=True, slots=True)
class GpuField:
    """One of DCGM's fields, and its value in a reading; None where the GPU does not report it."""

    #: Without the prefix `DCGM_FI_DEV_`.
    name: str
    help: str
    read: Callable[[GpuReading], float | None]
    #: Whether each MIG device has a value; otherwise only the whole GPU has one.
    of_mig_devices: bool = False
    #: Whether it only grows. Prometheus' library would add `_total` to the name of a counter, which DCGM's do not have.
    is_counter: bool = False


FIELDS = (
    GpuField("GPU_UTIL", "GPU utilization (in %).", lambda gpu: gpu.utilisation_percent),
    GpuField("MEM_COPY_UTIL", "Memory utilization (in %).", lambda gpu: gpu.memory_utilisation_percent),
    GpuField("FB_USED", "Framebuffer memory used (in MiB).", lambda gpu: gpu.memory_used_mib, of_mig_devices=True),
    GpuField(
        "FB_FREE",
        "Framebuffer memory free (in MiB).",
        lambda gpu: None if gpu.memory_used_mib is None else gpu.memory_mib - gpu.memory_used_mib,
        of_mig_devices=True,
    ),
    GpuField("FB_TOTAL", "Framebuffer memory in total (in MiB).", lambda gpu: gpu.memory_mib, of_mig_devices=True),
    GpuField("POWER_USAGE", "Power draw (in W).", lambda gpu: gpu.power_w),
    GpuField("ENFORCED_POWER_LIMIT", "The lowest of all power limits (in W).", lambda gpu: gpu.power_limit_w),
    GpuField(
        "TOTAL_ENERGY_CONSUMPTION",
        "Energy since the driver was loaded (in mJ).",
        lambda gpu: gpu.energy_mj,
        is_counter=True,
    ),
    GpuField("GPU_TEMP", "GPU temperature (in C).", lambda gpu: gpu.temperature_c),
    GpuField(
        "CLOCKS_EVENT_REASONS",
        "Why clocks are lower than they could be (bit mask of NVML).",
        lambda gpu: gpu.clocks_event_reasons,
    ),
    GpuField(
        "ECC_DBE_VOL_TOTAL",
        "Uncorrectable memory errors since the driver was loaded.",
        lambda gpu: gpu.ecc_uncorrected,
        is_counter=True,
    ),
    GpuField(
        "CORRECTABLE_REMAPPED_ROWS",
        "Rows of memory replaced after correctable errors.",
        lambda gpu: None if gpu.remapped_rows is None else gpu.remapped_rows[0],
        is_counter=True,
    ),
    GpuField(
        "UNCORRECTABLE_REMAPPED_ROWS",
        "Rows of memory replaced after uncorrectable errors.",
        lambda gpu: None if gpu.remapped_rows is None else gpu.remapped_rows[1],
        is_counter=True,
    ),
    GpuField(
        "ROW_REMAP_FAILURE", "Whether a failing row of memory could not be replaced.", lambda gpu: gpu.remap_failed
    ),
    GpuField("ROW_REMAP_PENDING", "Whether a row of memory waits to be replaced.", lambda gpu: gpu.remap_pending),
    GpuField("PCIE_LINK_GEN", "PCIe generation now.", lambda gpu: None if gpu.link is None else gpu.link.generation),
    GpuField("PCIE_LINK_WIDTH", "PCIe lanes now.", lambda gpu: None if gpu.link is None else gpu.link.width),
    GpuField(
        "PCIE_MAX_LINK_GEN",
        "The highest PCIe generation of card and slot.",
        lambda gpu: None if gpu.link_limit is None else gpu.link_limit.generation,
    ),
    GpuField(
        "PCIE_MAX_LINK_WIDTH",
        "The most PCIe lanes of card and slot.",
        lambda gpu: None if gpu.link_limit is None else gpu.link_limit.width,
    ),
)


def collect_gpus(records: Mapping[str, NodeStatus], views: Sequence[NodeView], monotonic: float) -> Iterator[Metric]:
    """Yield the metrics of all GPUs.

    Args:
        records: The nodes as last read, by name.
        views: The same nodes, as shown to all users.
        monotonic: The broker's monotonic time, which decides whether a reading is recent.
    """
    readings = [
        (record.name, gpu)
        for record in records.values()
        if record.is_up and record.gpu_error is None and record.is_fresh(monotonic)
        for gpu in record.gpus
        if gpu.error is None
    ]
    for field in FIELDS:
        yield _collect_field(field, readings)
    yield _collect_throttling(readings)
    yield from _collect_xids(records)
    yield _collect_faults(records)
    yield _collect_states(views)


def label_gpu(node: str, index: int, uuid: str, model: str) -> tuple[str, ...]:
    """Return the values of `LABELS`."""
    return str(index), uuid, model, node


def _label_reading(node: str, gpu: GpuReading, *, is_device: bool = False) -> tuple[str, ...]:
    """Return `LABELS` of a reading: those of the whole GPU, or of its MIG device if `is_device`."""
    if is_device or gpu.parent is None:
        return label_gpu(node, gpu.index, gpu.uuid, gpu.model)
    return label_gpu(node, gpu.index, gpu.parent, gpu.model.partition(" MIG ")[0])


def _label_dcgm(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of `DCGM_LABELS` for those of `LABELS`."""
    index, uuid, model, node = labels
    return index, uuid, f"nvidia{index}", model, node


def _collect_field(field: GpuField, readings: Sequence[tuple[str, GpuReading]]) -> Metric:
    family = (UnknownMetricFamily if field.is_counter else GaugeMetricFamily)(
        f"DCGM_FI_DEV_{field.name}", field.help, labels=DCGM_LABELS
    )
    # MIG devices of a GPU have its sensors' values in common.
    values = {_label_reading(node, gpu, is_device=field.of_mig_devices): field.read(gpu) for node, gpu in readings}
    for labels, value in values.items():
        if value is not None:
            family.add_metric(_label_dcgm(labels), float(value))
    return family


def _collect_throttling(readings: Sequence[tuple[str, GpuReading]]) -> Metric:
    family = GaugeMetricFamily(
        "gpuhub_gpu_throttled",
        "Whether the GPU's clocks are lowered for a reason.",
        labels=(*LABELS, "reason"),
    )
    for labels, reasons in {_label_reading(node, gpu): gpu.clocks_event_reasons for node, gpu in readings}.items():
        for reason, bit in THROTTLE_REASONS.items() if reasons is not None else ():
            family.add_metric((*labels, reason), float(bool((reasons or 0) & bit)))
    return family


def _collect_xids(records: Mapping[str, NodeStatus]) -> Iterator[Metric]:
    """Yield the Xid errors, also those of GPUs that were lost by them."""
    last = GaugeMetricFamily("DCGM_FI_DEV_XID_ERRORS", "Code of the last Xid error, 0 for none.", labels=DCGM_LABELS)
    errors = CounterMetricFamily(
        "gpuhub_gpu_xid_errors", "Xid errors since the start of the node's GPU agent.", labels=(*LABELS, "xid")
    )
    times = GaugeMetricFamily(
        "gpuhub_gpu_xid_last_timestamp_seconds",
        "Time of the last Xid error with this code, by the node's clock.",
        labels=(*LABELS, "xid"),
    )
    for record in records.values():
        gpus = {gpu.parent or gpu.uuid: _label_reading(record.name, gpu) for gpu in record.gpus}
        for uuid, labels in gpus.items():
            if uuid not in record.xids:
                continue
            seen = record.xids[uuid]
            newest = max(seen, key=lambda error: error.last_at, default=None)
            last.add_metric(_label_dcgm(labels), 0.0 if newest is None else float(newest.code))
            for error in seen:
                errors.add_metric((*labels, str(error.code)), float(error.count))
                times.add_metric((*labels, str(error.code)), error.last_at)
    yield from (last, errors, times)


def _collect_faults(records: Mapping[str, NodeStatus]) -> Metric:
    family = GaugeMetricFamily(
        "gpuhub_gpu_fault",
        "1 for a fault that keeps the GPU from being granted until a reboot or until an administrator accepts it.",
        labels=(*LABELS, "kind", "code"),
    )
    for record in records.values():
        gpus = {gpu.whole_uuid: _label_reading(record.name, gpu) for gpu in record.gpus}
        for uuid, faults in record.faults.items():
            for fault in faults if uuid in gpus else ():
                family.add_metric((*gpus[uuid], fault.kind, str(fault.code)), 1.0)
    return family


def _collect_states(views: Sequence[NodeView]) -> Metric:
    family = GaugeMetricFamily(
        "gpuhub_gpu_state", "1 for the GPU's current state, 0 for the others.", labels=(*LABELS, "state")
    )
    for node in views:
        for gpu in node.gpus:
            labels = label_gpu(node.name, gpu.index, gpu.uuid, gpu.model)
            for state in GpuState:
                family.add_metric((*labels, state.value), float(gpu.state is state))
    return family
