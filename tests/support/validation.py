"""What the programs of `gpuhub validate` report, and a report made of it; the jobs run on simulated nodes."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from gpuhub.common import names
from gpuhub.ops.validation.report import (
    Better,
    Figure,
    Part,
    Report,
    ReportedGpu,
    ReportedNode,
    failed,
    info,
    passed,
)
from tests.support.broker.in_process import Running
from tests.support.docker.simulated_nodes import SimulatedNode

UID = 20001


def build_gpu_result(node: str, uuid: str, **changes: Any) -> dict[str, Any]:
    """Return what single_gpu.py writes on a real GPU, with a throughput alone and beside others."""
    return {
        "node": node,
        "uuids": [uuid],
        "uid": UID,
        "home_uid": UID,
        "file_uid": UID,
        "is_simulated": False,
        "device": "NVIDIA RTX 5090",
        "deviation": 2e-7,
        "alone_tflops": 200.0,
        "together_tflops": 199.0,
        **changes,
    }


def build_network_result(nodes: list[str], **changes: Any) -> dict[str, Any]:
    """Return what network.py writes; the changes apply to every path."""
    return {
        "nodes": [
            {
                "node": node,
                "host": f"host-{node}",
                "address": f"10.1.0.{number}",
                "interface": "eth1",
                "mtu": 1450,
                "ports": {"echo": 4000, "sink": 4001},
            }
            for number, node in enumerate(nodes, 1)
        ],
        "paths": [
            {
                "from": first,
                "to": second,
                "gateway": "",
                "round_trip_ms": 0.2,
                "lost": 0,
                "mtu": 1450,
                "full_packets_lost": 0,
                "gbit_per_s": 2.3,
                **changes,
            }
            for first in nodes
            for second in nodes
            if first != second
        ],
    }


def build_ddp_result(nodes: list[str], **changes: Any) -> dict[str, Any]:
    """Return what ddp.py writes; the changes apply to the last rank."""
    total = len(nodes) * (len(nodes) + 1) / 2
    ranks: list[dict[str, Any]] = [
        {"rank": rank, "node": node, "sums": [total, total], "from_ranks": 0.0, "from_single": 3e-8}
        for rank, node in enumerate(nodes)
    ]
    ranks[-1] |= changes
    scaling = [
        {"nodes": nodes[:size], "step_s": 0.04 if size == 1 else 0.2 + size / 100, "alone_s": 0.04}
        for size in sorted({1, min(2, len(nodes)), len(nodes)})
    ]
    return {
        "backend": "nccl",
        "expected_sum": total,
        "ranks": ranks,
        "gradient_bytes": 67_108_864,
        "scaling": scaling,
    }


def build_report(*, bandwidth: float = 2.3, is_simulated: bool = False, has_failed: bool = False) -> Report:
    """Return a short report."""
    last = (
        failed(
            "all: GPUs are free",
            "rig2 GPU 0 is held",
            expected="all 2 free within 90 s",
            advice="`gpuhub lease list` and `gpuhub events`",
        )
        if has_failed
        else passed("all: GPUs are free", "all 2")
    )
    path = Figure(name="network.rig1-rig2.bandwidth", value=bandwidth, unit="Gbit/s", better=Better.HIGHER)
    trip = Figure(name="network.rig1-rig2.round_trip", value=0.2, unit="ms", better=Better.LOWER)
    ratio = Figure(name="closet.jobs_at_once_over_one", value=1.99, unit="", better=Better.HIGHER)
    return Report(
        gpuhub="0.2.0",
        started_at=datetime(2026, 3, 14, 10, 15, tzinfo=UTC),
        duration_s=95.0,
        user="ada",
        is_simulated=is_simulated,
        nodes=tuple(
            ReportedNode(
                name=name,
                driver="580.95.05",
                gpus=(ReportedGpu(uuid=f"GPU-{name}-0", model="RTX 5090", memory_mib=32607),),
            )
            for name in ("rig1", "rig2")
        ),
        parts=(
            Part(
                name="all-at-once",
                title="2 jobs at once, one for each GPU",
                duration_s=31.0,
                checks=(
                    passed("rig1 GPU 0: visible GPUs", "GPU-rig1-0"),
                    info("all: jobs at once over one", "1.99 × the throughput of one job, with 2 jobs"),
                ),
                figures=(ratio,),
            ),
            Part(
                name="hello",
                title="the network between 2 nodes, in one launch",
                duration_s=20.0,
                checks=(passed("rig1 to rig2", "0.20 ms, 2.30 Gbit/s, MTU 1450, direct"),),
                figures=(path, trip),
            ),
            Part(name="afterwards", title="everything is free again", duration_s=2.0, checks=(last,)),
        ),
    )


class SimulatedPrograms:
    """Stands for what runs in the workers on simulated nodes: writes what a program reports, and ends the containers."""

    def __init__(
        self,
        running: Running,
        owner: str,
        change: Callable[[str, dict[str, Any]], dict[str, Any] | None] = lambda program, result: result,
    ) -> None:
        """`change` gets the program's name and its result, and returns what is written; None for a failure."""
        self._running, self._owner, self._change = running, owner, change
        #: The programs that ran, in order, with the number of their nodes.
        self.ran: list[tuple[str, int]] = []
        #: The jobs that wait for each other, by the folder in which they do.
        self._met: defaultdict[str, set[str]] = defaultdict(set)

    async def run(self) -> None:
        """Run every job's program, until it is cancelled."""
        while True:
            jobs: defaultdict[str, list[tuple[SimulatedNode, dict[str, Any]]]] = defaultdict(list)
            for node in self._running.setting.nodes.values():
                for container in node.of_kind(names.KIND_WORKER):
                    if container["State"] == "running":
                        jobs[container["Labels"][names.LABEL_JOB]].append((node, container))
            for job_id, containers in jobs.items():
                self._run_job(job_id, containers)
            await asyncio.sleep(0.01)

    def _run_job(self, job_id: str, containers: list[tuple[SimulatedNode, dict[str, Any]]]) -> None:
        run_id = next(spec.run_id for spec in self._running.workers.specs if spec.job_id == job_id)
        folder = self._running.setting.home(self._owner) / ".gpu_launch/jobs" / run_id
        _, file, *arguments = json.loads((folder / "job.json").read_text())["words"]
        program = file.removesuffix(".py")
        nodes = [node.name for node, _ in containers]
        if program != "single_gpu" and len(nodes) < len(self._running.setting.nodes):
            return  # its other workers start in a moment
        if program == "single_gpu" and not self._have_met(job_id, arguments):
            return
        self.ran.append((program, len(nodes)))
        result = self._change(program, _build_result(program, nodes, containers[0][1]))
        if result is not None:
            (folder / "result.json").write_text(json.dumps(result))
        for node, container in containers:
            node.end_container(container["Id"], code=0 if result is not None else 1)

    def _have_met(self, job_id: str, arguments: list[str]) -> bool:
        """Return whether all the jobs run, of those that `single_gpu.py` waits for."""
        if len(arguments) < 4:
            return True
        _, folder, _, count = arguments
        self._met[folder].add(job_id)
        return len(self._met[folder]) == int(count)


def _build_result(program: str, nodes: list[str], container: dict[str, Any]) -> dict[str, Any]:
    if program == "network":
        return build_network_result(nodes)
    if program == "ddp":
        return build_ddp_result(nodes)
    return build_gpu_result(nodes[0], container["Labels"]["uuids"])
