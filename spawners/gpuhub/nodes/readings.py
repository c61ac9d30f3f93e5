"""The GPU agent's lines, and how they change what is known of a node. Pure; times are monotonic seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuhub import gpus
from gpuhub.nodes.records import AgentReading, GpuReading, NodeRecord, Process

#: The driver lists it no longer.
VANISHED = "the driver no longer reports it"


def agent_failed(node: NodeRecord, trouble: str) -> NodeRecord:
    """The agent cannot be run or read."""
    return node.evolve(gpu_trouble=trouble, read_at=None, printed_after=None)


def agent_read(node: NodeRecord, reading: AgentReading, now: float) -> NodeRecord:
    """A line of the agent, new or seen before. `now` is when asking for it began."""
    looked_at, node = node.looked_at, node.evolve(looked_at=now)
    if reading.n == node.line:
        return node.evolve(gpu_trouble=reading.error)
    # Had it been printed before the last look, that look would have shown it.
    node = node.evolve(line=reading.n, read_at=now, printed_after=looked_at, gpu_trouble=reading.error)
    if reading.boot_id is not None:
        node = node.evolve(boot_id=reading.boot_id)
    if reading.error is not None:
        return node.evolve(gpus=tuple(replace(gpu, error=reading.error) for gpu in node.gpus))
    return node.evolve(gpus=merge(node.gpus, reading.gpus), is_known=True, driver=reading.driver)


def parse_agent_line(line: bytes) -> AgentReading | None:
    """The agent's last line (format: see `agent`); None when it is empty or cut off."""
    try:
        raw = json.loads(line.decode("utf-8").strip() or "null")
        if raw is None:
            return None
        return AgentReading(
            n=int(raw["n"]),
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
        model=gpus.short_model(raw.get("name") or ""),
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
        else tuple(Process(pid=int(one["pid"]), memory_mib=one["memory_mib"]) for one in processes),
    )


def merge(known: Sequence[GpuReading], read: Iterable[GpuReading]) -> tuple[GpuReading, ...]:
    """New readings over what was known: a GPU that fails, or is no longer listed, is kept and named as failed.

    Where a GPU was split into MIG devices, joined again or split in another way, what it was before is forgotten.
    """
    found: dict[str, GpuReading] = {}
    broken: dict[int, str] = {}
    for gpu in read:
        if gpu.uuid:
            found[gpu.uuid] = gpu
        elif gpu.error is not None:
            broken[gpu.index] = gpu.error
    whole = {gpu.parent or gpu.uuid for gpu in found.values()}
    kept = [gpu for gpu in known if gpu.uuid not in found and (gpu.parent or gpu.uuid) not in whole]
    for gpu in kept:
        if gpu.index in broken:
            found[gpu.uuid] = replace(gpu, error=broken[gpu.index], is_listed=True)
        else:
            found[gpu.uuid] = replace(gpu, error=VANISHED, is_listed=False)
    return tuple(sorted(found.values(), key=lambda gpu: (gpu.index, gpu.uuid if gpu.is_mig else "")))
