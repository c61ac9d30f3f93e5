"""The practice closet of the tests: starting it without a supervisor, and the load and faults of its GPUs."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import docker

from gpuhub.common.errors import NotFound, SettingsError
from gpuhub.common.paths import Paths
from gpuhub_closet import docker_daemons, lifecycle, shell
from gpuhub_closet.gpu_state import GpuFault, GpuLoad, MigLoad, format_load
from gpuhub_closet.paths import node_paths
from gpuhub_closet.topology import ClosetNode, ClosetPlan

INSTANCE = os.environ.get("GPUHUB_TEST_INSTANCE", "ghtest")


@dataclass(frozen=True, slots=True)
class Closet:
    """A running closet."""

    plan: ClosetPlan
    paths: Paths
    #: A plain cluster.toml of the closet.
    cluster_file: Path

    def client(self, node: ClosetNode | str) -> docker.DockerClient:
        """Return a new Docker client of a node; close it after use."""
        return docker.DockerClient(base_url=node_paths(self.paths, node).docker_url, version="auto", timeout=60)


def ensure_up(plan: ClosetPlan, paths: Paths) -> None:
    """Start the whole closet without a supervisor, and return when all daemons answer."""
    lifecycle.prepare_closet(plan, paths)
    for node in plan.nodes:
        if not docker_daemons.find_processes(plan, node):
            start_daemon(plan, node, paths)
    docker_daemons.wait_ready(plan, paths)


def start_daemon(plan: ClosetPlan, node: ClosetNode, paths: Paths) -> None:
    """Start a node's daemon in the background, without a supervisor."""
    command = ("setsid", "--fork", *docker_daemons.build_foreground_command(plan, node, paths))
    log = node_paths(paths, node).log
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def parse_load(text: str) -> GpuLoad:
    """Parse the text that `format_load` wrote."""
    single = dict(re.findall(r"^(utilization|memory_used_mib|fault|link_width) (\S+)$", text, re.MULTILINE))
    processes = re.findall(r"^process (\d+) (\d+)$", text, re.MULTILINE)
    [(reasons, xid, xid_count)] = re.findall(r"^clocks_event_reasons (\d+)\nxid (\d+) (\d+)$", text, re.MULTILINE) or [
        (0, 0, 0)
    ]
    return GpuLoad(
        utilisation_percent=int(single.get("utilization", 0)),
        memory_used_mib=int(single.get("memory_used_mib", 0)),
        fault=GpuFault(single.get("fault", "none")),
        clocks_event_reasons=int(reasons),
        xid=int(xid),
        xid_count=int(xid_count),
        link_width=int(single.get("link_width", 16)),
        processes=tuple((int(pid), int(used)) for pid, used in processes),
        mig_devices=_parse_mig_loads(text),
    )


def _parse_mig_loads(text: str) -> tuple[MigLoad, ...]:
    used = re.findall(r"^mig_memory_used_mib (\d+) (\d+)$", text, re.MULTILINE)
    processes = re.findall(r"^mig_process (\d+) (\d+) (\d+)$", text, re.MULTILINE)
    return tuple(
        MigLoad(
            memory_used_mib=int(mib),
            processes=tuple((int(pid), int(held)) for of, pid, held in processes if of == slot),
        )
        for slot, mib in used
    )


def read_load(paths: Paths, node: ClosetNode | str, index: int) -> GpuLoad:
    """Return the GPU's load and fault.

    Raises:
        NotFound: The node has no such GPU, or is not up.
    """
    return parse_load(_live_file(paths, node, index).read_text())


def set_gpu_load(paths: Paths, node: ClosetNode | str, index: int, load: GpuLoad) -> None:
    """Replace the GPU's whole load and fault."""
    shell.replace_file(_live_file(paths, node, index), format_load(load).encode())


def set_load(
    paths: Paths,
    node: ClosetNode | str,
    index: int,
    utilisation_percent: int,
    memory_used_mib: int,
    *,
    processes: tuple[tuple[int, int], ...] = (),
) -> None:
    """Set a GPU's load; its containers see it at their next reading."""
    load = replace(
        read_load(paths, node, index),
        utilisation_percent=utilisation_percent,
        memory_used_mib=memory_used_mib,
        processes=processes,
    )
    set_gpu_load(paths, node, index, load)


def set_fault(paths: Paths, node: ClosetNode | str, index: int, fault: GpuFault | str) -> None:
    """Break a GPU (`lost`, `fallen_off_bus`, `driver_mismatch`, `ecc`, `remap_failed`, `hang`) or repair it (`none`)."""
    faults = [str(known_fault) for known_fault in GpuFault]
    if fault not in faults:
        raise SettingsError(f"fault {fault!r} is unknown; there are: {', '.join(faults)}")
    set_gpu_load(paths, node, index, replace(read_load(paths, node, index), fault=GpuFault(fault)))


def set_outsiders(paths: Paths, node: ClosetNode | str, index: int, processes: tuple[tuple[int, int], ...]) -> None:
    """Let programs that gpuhub did not start use a GPU, by process id and memory in MiB."""
    load = read_load(paths, node, index)
    others = sum(used for _, used in load.processes)
    used = load.memory_used_mib - others + sum(used for _, used in processes)
    set_gpu_load(paths, node, index, replace(load, memory_used_mib=max(0, used), processes=processes))


def _live_file(paths: Paths, node: ClosetNode | str, index: int) -> Path:
    file = node_paths(paths, node).gpus / str(index) / "live"
    if not file.exists():
        raise NotFound(
            f"closet node {node_paths(paths, node).run.name} has no simulated GPU {index}: its GPUs are real, or it is "
            "not up"
        )
    return file
