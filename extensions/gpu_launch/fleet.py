"""A launch's engines: a controller here, an engine on every node, and calls to their agents."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
import threading
import time
from typing import Any

from gpu_launch import agent
from gpu_launch.errors import LaunchFailed
from gpu_launch.gang import Gang
from gpu_launch.spec import LaunchSpec, NodeInfo

#: Engines prove to be there every 100 ms, so that they are known at once; gone after 15 s of silence, both ways.
_PING_MS = 100
_MISSES = 150
HEARTBEAT_MISSES = 25  # of (100 + 500) ms each, by ipyparallel's rule
_ENGINE_S = 90.0  # seconds for an engine of a running container to register
_CALL_S = 20.0  # seconds for a call to an agent
_POLL_S = 0.01  # seconds between looks for new engines


class Fleet:
    """Runs `up` in a thread of its own; then calls to the agents are for one thread at a time."""

    def __init__(self, gang: Gang, address: str) -> None:
        self._gang, self._address = gang, address
        self._cluster: Any = None
        self._client: Any = None
        self._views: dict[int, Any] = {}
        self._stopping = threading.Event()
        self.infos: dict[int, NodeInfo] = {}

    def up(self, spec: LaunchSpec) -> LaunchSpec:
        """Start controller and engines, and torchrun on each node as soon as its engine is there.

        `spec` lacks the master's port where node 0 is a worker; the one returned has it.
        """
        asyncio.run(self._start_cluster())
        self._client = asyncio.run(self._cluster.connect_client())
        calls: dict[int, Any] = {}
        deadline = float("inf")
        while len(calls) < self._gang.plan.nnodes and not self._stopping.is_set():
            self._gang.check()
            self._meet()
            if not spec.master_port and 0 in self.infos:
                spec = with_master(spec, self.infos[0])
            if spec.master_port:
                calls |= {rank: self._call(rank, agent.start, spec) for rank in self._views if rank not in calls}
            if self._gang.is_started():
                deadline = min(deadline, time.monotonic() + _ENGINE_S)
            if time.monotonic() > deadline:
                raise LaunchFailed(self._missing())
            time.sleep(_POLL_S)
        for rank, call in calls.items():
            self._result(rank, call)
        return spec

    def again(self, spec: LaunchSpec) -> LaunchSpec:
        """Start torchrun everywhere once more, on a fresh port of node 0."""
        first = self._result(0, self._call(0, agent.describe))
        spec = with_master(dataclasses.replace(spec, attempt=spec.attempt + 1), first)
        calls = {rank: self._call(rank, agent.start, spec) for rank in self._views}
        for rank, call in calls.items():
            self._result(rank, call)
        return spec

    def signal(self, number: int) -> None:
        """Send a signal to every node's torchrun, without waiting."""
        for rank in self._views:
            self._call(rank, agent.signal, number, self._gang.run.run_id)

    def kill(self) -> None:
        """End every rank at once, without waiting."""
        for rank in self._views:
            self._call(rank, agent.kill, self._gang.run.run_id)

    def stop_waiting(self) -> None:
        """Have `up` return soon."""
        self._stopping.set()

    def down(self) -> None:
        """Stop the controller, after `up` has returned; engines are the gang's."""
        if self._client is not None:
            self._client.close()
        if self._cluster is not None:
            asyncio.run(self._cluster.stop_controller())

    async def _start_cluster(self) -> None:
        import ipyparallel
        from traitlets.config import Config

        from gpu_launch.engines import GpuhubEngineSetLauncher

        log = logging.getLogger("gpu_launch.ipyparallel")
        log.setLevel(logging.CRITICAL)
        config = Config()
        config.LocalControllerLauncher.controller_cmd = [sys.executable, "-m", "gpu_launch.controller_process"]
        profile = str(self._gang.run.profile)
        self._cluster = ipyparallel.Cluster(
            engines=GpuhubEngineSetLauncher,
            config=config,
            load_profile=False,
            profile_dir=profile,
            cluster_id="",
            cluster_file="",
            log=log,
            controller_args=controller_arguments(self._address),
            # The launcher hands the connection on itself, so that controller and containers start at the same time.
            send_engines_connection_env=False,
            # `Launch` frees everything itself; at the interpreter's end it would be too late for ipyparallel to.
            shutdown_atexit=False,
        )
        await self._cluster.start_controller(environment={"IPP_ENABLE_CURVE": "1"})
        await self._cluster.start_engines(self._gang.plan.nnodes, gang=self._gang)

    def _meet(self) -> None:
        """Learn which node each new engine is on."""
        known = {view.targets for view in self._views.values()}
        for engine in self._client.ids:
            if engine not in known:
                view = self._client[engine]
                info: NodeInfo = view.apply_async(agent.describe).get(timeout=_CALL_S)
                rank = self._gang.plan.node_rank(info.worker)
                self.infos[rank], self._views[rank] = info, view

    def _call(self, rank: int, function: Any, *arguments: Any) -> Any:
        return self._views[rank].apply_async(function, *arguments)

    def _result(self, rank: int, call: Any) -> Any:
        from ipyparallel.error import IPythonError

        try:
            return call.get(timeout=_CALL_S)
        except IPythonError as error:
            raise LaunchFailed(f"The agent on {self.infos[rank].node} failed: {error}") from None

    def _missing(self) -> str:
        plan, job = self._gang.plan, self._gang.job
        nodes = {plan.node_rank(worker.index): worker.node for worker in (job.workers if job else ())}
        missing = ", ".join(nodes.get(rank, "this container") for rank in range(plan.nnodes) if rank not in self._views)
        return f"No engine answered within {_ENGINE_S:.0f} s on: {missing}. Logs: {self._gang.run.logs}"


def with_master(spec: LaunchSpec, first: NodeInfo) -> LaunchSpec:
    """`spec` with node 0's address and a free port of it."""
    return dataclasses.replace(spec, master_addr=first.address, master_port=first.port)


def controller_arguments(address: str) -> list[str]:
    """A controller whose engine side listens on `address` and whose client side stays on loopback."""
    return [
        f"--IPController.engine_ip={address}",
        f"--location={address}",
        f"--ping={_PING_MS}",
        f"--HeartMonitor.max_heartmonitor_misses={_MISSES}",
        # Less to start: a launch calls engines one by one.
        "--IPController.broadcast_scheduler_depth=0",
        "--nodb",
    ]
