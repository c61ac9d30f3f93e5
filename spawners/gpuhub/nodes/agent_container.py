"""Runs the GPU agent's container on a node, and applies the agent's lines to the node's status.

Lines are read through Docker, without a port or network. Times are monotonic seconds.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from docker.types import DeviceRequest, LogConfig

from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError, NotFound
from gpuhub.common.gpu import shorten_model
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.container_spec import BASE_IMAGE
from gpuhub.nodes import agent
from gpuhub.nodes.status import AgentReading, GpuProcess, GpuReading, NodeStatus, PcieLink, XidErrors, XidsByGpu

#: Hash of script and image; when it differs, the container is replaced.
LABEL_BUILD = "gpuhub.agent"
_UNPRIVILEGED_USER = "65534:65534"
#: Chunks of 16 KiB to read from the log; more than a line of 64 GPUs has.
_LOG_CHUNKS = 8
#: A higher power limit of one GPU counts as not reported, watts.
MAX_POWER_LIMIT_W = 10_000.0
#: Error of a GPU that the driver no longer lists.
VANISHED = "the driver no longer reports it"


async def ensure_agent(daemons: DockerClients, node: str, existing: Mapping[str, Any] | None) -> str:
    """Ensure that an agent of this version runs, and return its container's id.

    Args:
        existing: The daemon's list entry of the current container; None if there is none.

    Raises:
        ImageMissing, NodeUnreachable, GpuhubError: The agent cannot run there now.
    """
    image = await daemons.call(node, "inspect_image", BASE_IMAGE)
    build = build_hash(agent_script(), str(image["Id"]))
    if existing is not None:
        is_same = (existing.get("Labels") or {}).get(LABEL_BUILD) == build
        if is_same and existing.get("State") == "running":
            return str(existing["Id"])
        await _remove(daemons, node, str(existing["Id"]))
    host = await daemons.call(node, "create_host_config", **build_host_config())
    created = await daemons.call(
        node, "create_container", host_config=host, **build_container(daemons.instance, build, agent_script())
    )
    try:
        await daemons.call(node, "start", created["Id"])
    except GpuhubError as error:
        await _remove(daemons, node, str(created["Id"]))
        if "could not select device driver" in str(error):
            raise GpuhubError(
                f"node {node}: its Docker has no NVIDIA container toolkit, so its GPUs cannot be used"
            ) from error
        raise
    return str(created["Id"])


async def read_last_line(daemons: DockerClients, node: str, container_id: str) -> bytes:
    """Return the agent's last complete line; empty right after its start.

    Raises:
        NodeUnreachable: The node does not answer.
        NotFound: The container does not exist.
    """
    text: bytes = await daemons.call(node, "logs", container_id, stdout=True, stderr=False, tail=_LOG_CHUNKS)
    return find_last_line(text)


def find_last_line(text: bytes) -> bytes:
    """Return the last line with a line end; Docker counts each 16 KiB of a long line as one line."""
    lines = text.split(b"\n")
    return lines[-2] if len(lines) > 1 else b""


def agent_script() -> str:
    """Return the source of `agent`, which runs without gpuhub."""
    return inspect.getsource(agent)


def build_hash(script: str, image_id: str) -> str:
    """Return a hash of the script, the image and the container's arguments."""
    arguments = repr(build_host_config()) + repr(build_container("", "", ""))
    return hashlib.sha256("\0".join((script, image_id, arguments)).encode()).hexdigest()[:32]


def build_container(instance: str, build: str, script: str) -> dict[str, Any]:
    """Build the arguments of `create_container`."""
    return {
        "image": BASE_IMAGE,
        "name": names.agent_container_name(instance),
        "command": ["python3", "-u", "-c", script],
        "user": _UNPRIVILEGED_USER,
        "labels": {
            names.LABEL_INSTANCE: instance,
            names.LABEL_KIND: names.KIND_AGENT,
            LABEL_BUILD: build,
        },
    }


def build_host_config() -> dict[str, Any]:
    """Build the arguments of `create_host_config`: access to all GPUs, and to nothing else."""
    return {
        "device_requests": [DeviceRequest(count=-1, capabilities=[["gpu"]])],
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "read_only": True,
        "init": True,
        "mem_limit": "256m",
        "pids_limit": 32,
        # Also for 8 GPUs more than the 20 minutes that `gpuhub doctor` compares.
        "log_config": LogConfig(type="json-file", config={"max-size": "4m", "max-file": "2"}),
    }


async def _remove(daemons: DockerClients, node: str, container_id: str) -> None:
    try:
        await daemons.call(node, "remove_container", container_id, force=True, v=True)
    except (NotFound, Conflict):
        # Gone, or being removed now; the next poll shows which.
        return


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
    if reading.disk_free is not None:
        node = node.evolve(disk_free=reading.disk_free)
    if reading.xids is not None:
        node = node.evolve(xids=reading.xids)
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
            disk_free=raw.get("disk_free"),
            xids=_parse_xids(raw.get("xids")),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _parse_gpu(raw: Mapping[str, Any]) -> GpuReading:
    capability, remapped_rows = raw.get("capability"), raw.get("remapped_rows")
    pcie, loaded_link = raw.get("pcie"), raw.get("loaded_link")
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
        remap_pending=raw.get("remap_pending"),
        remapped_rows=None if remapped_rows is None else (int(remapped_rows[0]), int(remapped_rows[1])),
        utilisation_percent=raw.get("utilisation_percent"),
        memory_utilisation_percent=raw.get("memory_utilisation_percent"),
        memory_used_mib=raw.get("memory_used_mib"),
        energy_mj=raw.get("energy_mj"),
        clocks_event_reasons=raw.get("clocks_event_reasons"),
        is_throttled=bool(raw.get("is_throttled")),
        link=None if pcie is None else _parse_link(pcie["generation"], pcie["width"]),
        link_limit=None if pcie is None else _parse_link(pcie["most_generation"], pcie["most_width"]),
        loaded_link=None if loaded_link is None else _parse_link(*loaded_link),
        power_w=raw.get("power_w"),
        power_limit_w=_parse_power_limit(raw.get("power_limit_w")),
        temperature_c=raw.get("temperature_c"),
        processes=_parse_processes(raw.get("processes")),
        graphics=_parse_processes(raw.get("graphics")),
    )


def _parse_processes(raw: Sequence[Mapping[str, Any]] | None) -> tuple[GpuProcess, ...] | None:
    if raw is None:
        return None
    return tuple(GpuProcess(pid=int(process["pid"]), memory_mib=process["memory_mib"]) for process in raw)


def _parse_link(generation: Any, width: Any) -> PcieLink:
    return PcieLink(generation=int(generation), width=int(width))


def _parse_xids(raw: Mapping[str, Sequence[Mapping[str, Any]]] | None) -> XidsByGpu | None:
    if raw is None:
        return None
    return {
        uuid: tuple(
            XidErrors(code=int(error["code"]), count=int(error["count"]), last_at=float(error["at"]))
            for error in errors
        )
        for uuid, errors in raw.items()
    }


def _parse_power_limit(raw: Any) -> float | None:
    is_number = isinstance(raw, int | float) and not isinstance(raw, bool)
    return float(raw) if is_number and 0 < raw <= MAX_POWER_LIMIT_W else None


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
