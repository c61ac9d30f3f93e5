"""Parses the GPU agent's lines and applies them to a node's status. Times are monotonic seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuhub.common.gpu import shorten_model
from gpuhub.nodes.status import AgentReading, GpuProcess, GpuReading, NodeStatus

#: Error of a GPU that the driver no longer lists.
VANISHED = "the driver no longer reports it"


def record_agent_failure(node: NodeStatus, reason: str) -> NodeStatus:
    """Return the status after a failure to run or read the agent."""
    return node.evolve(gpu_error=reason, read_at=None, printed_after=None)


def record_agent_reading(node: NodeStatus, reading: AgentReading, now: float) -> NodeStatus:
    """Return the status after a line of the agent, new or seen before.

    Args:
        now: Time at which the request for the line began.
    """
    polled_at, node = node.polled_at, node.evolve(polled_at=now)
    if reading.line_number == node.line_number:
        return node.evolve(gpu_error=reading.error)
    # If the line had been printed before the last poll, that poll would have returned it.
    node = node.evolve(line_number=reading.line_number, read_at=now, printed_after=polled_at, gpu_error=reading.error)
    if reading.boot_id is not None:
        node = node.evolve(boot_id=reading.boot_id)
    if reading.error is not None:
        return node.evolve(gpus=tuple(replace(gpu, error=reading.error) for gpu in node.gpus))
    return node.evolve(gpus=merge_readings(node.gpus, reading.gpus), has_readings=True, driver=reading.driver)


def parse_agent_line(line: bytes) -> AgentReading | None:
    """Parse the agent's last line (format: see `agent`); return None if it is empty or incomplete."""
    try:
        raw = json.loads(line.decode("utf-8").strip() or "null")
        if raw is None:
            return None
        return AgentReading(
            line_number=int(raw["n"]),
            error=raw["error"],
            gpus=tuple(_parse_gpu(gpu) for gpu in raw["gpus"]),
            boot_id=raw["boot_id"],
            driver=raw["driver"],
        )
    except (ValueError, KeyError, TypeError):
        return None


def _parse_gpu(raw: Mapping[str, Any]) -> GpuReading:
    processes, capability = raw.get("processes"), raw.get("capability")
    return GpuReading(
        uuid=raw.get("uuid") or "",
        index=int(raw["index"]),
        model=shorten_model(raw.get("name") or ""),
        memory_mib=int(raw.get("memory_total_mib") or 0),
        error=raw["error"],
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        is_mig=bool(raw.get("mig")),
        parent=raw.get("parent"),
        ecc_uncorrected=raw.get("ecc_uncorrected"),
        remap_failed=raw.get("remap_failed"),
        utilisation_percent=raw.get("utilisation_percent"),
        memory_used_mib=raw.get("memory_used_mib"),
        power_w=raw.get("power_w"),
        temperature_c=raw.get("temperature_c"),
        processes=None
        if processes is None
        else tuple(GpuProcess(pid=int(process["pid"]), memory_mib=process["memory_mib"]) for process in processes),
    )


def merge_readings(known: Sequence[GpuReading], read: Iterable[GpuReading]) -> tuple[GpuReading, ...]:
    """Merge new readings into the known ones. A GPU that fails, or is no longer listed, is kept as failed.

    When a GPU is split into MIG devices, joined again or split differently, its former devices are dropped.
    """
    merged: dict[str, GpuReading] = {}
    errors: dict[int, str] = {}
    for gpu in read:
        if gpu.uuid:
            merged[gpu.uuid] = gpu
        elif gpu.error is not None:
            errors[gpu.index] = gpu.error
    present = {gpu.parent or gpu.uuid for gpu in merged.values()}
    missing = [gpu for gpu in known if gpu.uuid not in merged and (gpu.parent or gpu.uuid) not in present]
    for gpu in missing:
        if gpu.index in errors:
            merged[gpu.uuid] = replace(gpu, error=errors[gpu.index], is_listed=True)
        else:
            merged[gpu.uuid] = replace(gpu, error=VANISHED, is_listed=False)
    return tuple(sorted(merged.values(), key=lambda gpu: (gpu.index, gpu.uuid if gpu.is_mig else "")))
