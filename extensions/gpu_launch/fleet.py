"""A launch's engines: a controller here, an engine on every node, and calls to their agents."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from gpu_launch import agent
from gpu_launch.errors import LaunchFailed
from gpu_launch.gang import Gang
from gpu_launch.roster import Roster
from gpu_launch.spec import LaunchSpec, NodeInfo

#: Engines prove to be there every 100 ms, so that they are known at once; gone after 15 s of silence, both ways.
_PING_MS = 100
_MISSES = 150
HEARTBEAT_MISSES = 25  # of (100 + 500) ms each, by ipyparallel's rule
_ENGINE_S = 90.0  # seconds for an engine of a running container to register
_CALL_S = 20.0  # seconds for a call to an agent
_POLL_S = 0.01  # seconds between looks for new engines and for answers


class Fleet:
    """Members are workers' indexes; None is the notebook's own container. Runs `up` in a thread of its own; then calls
    to the agents are for one thread at a time.
    """

    def __init__(self, gang: Gang, address: str) -> None:
        self._gang, self._address = gang, address
        self._cluster: Any = None
        self._client: Any = None
        #: Engines that were asked who they are, and those that have not answered yet.
        self._known: set[int] = set()
        self._asked: dict[int, Any] = {}
        self._views: dict[int | None, Any] = {}
        self._infos: dict[int | None, NodeInfo] = {}

    def up(
        self,
        build: Callable[[Roster, NodeInfo], LaunchSpec],
        *,
        given_up: threading.Event,
        on_roster: Callable[[Roster], None],
    ) -> LaunchSpec | None:
        """Start torchrun on each node of the gang as soon as it is granted and its engine is there.

        `build` makes the start's spec of who takes part and node 0. Returns it when every node has confirmed;
        None when `given_up` was set meanwhile: some may have started then.
        """
        if self._client is None:
            asyncio.run(self._start_cluster())
            self._client = asyncio.run(self._cluster.connect_client())
        roster = self._await_roster(given_up)
        if roster is None:
            return None
        on_roster(roster)
        spec: LaunchSpec | None = None
        calls: dict[int | None, Any] = {}
        deadline = float("inf")
        while len(calls) < roster.nnodes:
            if given_up.is_set():
                return None
            self._gang.check()
            self._meet()
            if spec is None and roster.members[0] in self._views:
                spec = build(roster, self._result(roster.members[0], self._call(roster.members[0], agent.describe)))
            if spec is not None:
                ready = [member for member in roster.members if member in self._views and member not in calls]
                calls |= {member: self._call(member, agent.start, spec) for member in ready}
            if self._gang.is_started():
                deadline = min(deadline, time.monotonic() + _ENGINE_S)
            if time.monotonic() > deadline:
                raise LaunchFailed(self._missing(roster))
            time.sleep(_POLL_S)
        for member, call in calls.items():
            self._result(member, call, given_up)
        return spec

    def _await_roster(self, given_up: threading.Event) -> Roster | None:
        """Who takes part, engines that come meanwhile met; None when given up."""
        while (roster := self._gang.roster()) is None and not given_up.is_set():
            self._gang.check()
            self._meet()
            time.sleep(_POLL_S)
        return roster

    def signal(self, number: int) -> None:
        """Send a signal to every node's torchrun, without waiting."""
        self._tell(agent.signal, number, self._gang.run.run_id)

    def kill(self) -> None:
        """End every rank at once, without waiting."""
        self._tell(agent.kill, self._gang.run.run_id)

    def forget(self, workers: Iterable[int]) -> None:
        """These workers' containers are gone; other engines may come with the same indexes."""
        for worker in workers:
            self._views.pop(worker, None)
            self._infos.pop(worker, None)
        # One that has not said who it is may be gone too, or be here to stay: it is asked again.
        self._known -= self._asked.keys()
        self._asked.clear()

    def infos(self, roster: Roster) -> list[NodeInfo]:
        """What the members' agents said of their containers, by node rank."""
        return [self._infos[member] for member in roster.members]

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
        """Learn which node each new engine is on. One that is gone meanwhile never answers."""
        for engine in self._client.ids:
            if engine not in self._known:
                self._known.add(engine)
                view = self._client[engine]
                self._asked[engine] = (view, view.apply_async(agent.describe))
        for engine, (view, call) in list(self._asked.items()):
            if call.ready():
                del self._asked[engine]
                info = self._answer(call, "a new node")
                if info is not None:
                    self._views[info.worker], self._infos[info.worker] = view, info

    def _tell(self, function: Any, *arguments: Any) -> None:
        for view in self._views.values():
            if view.targets in self._client.ids:
                view.apply_async(function, *arguments)

    def _call(self, member: int | None, function: Any, *arguments: Any) -> Any:
        return self._views[member].apply_async(function, *arguments)

    def _result(self, member: int | None, call: Any, given_up: threading.Event | None = None) -> Any:
        node = self._infos[member].node
        deadline = time.monotonic() + _CALL_S
        while not call.ready():
            if given_up is not None and given_up.is_set():
                return None
            if time.monotonic() > deadline:
                raise LaunchFailed(f"The agent on {node} did not answer within {_CALL_S:.0f} s.")
            time.sleep(_POLL_S)
        answer = self._answer(call, node)
        if answer is None:
            raise LaunchFailed(f"The agent on {node} is gone.")
        return answer

    @staticmethod
    def _answer(call: Any, node: str) -> Any:
        """What an agent answered; None where its engine ended before."""
        from ipyparallel.error import EngineError, IPythonError

        try:
            return call.get(timeout=_CALL_S)
        except EngineError:
            return None
        except IPythonError as error:
            raise LaunchFailed(f"The agent on {node} failed: {error}") from None

    def _missing(self, roster: Roster) -> str:
        nodes = {worker.index: worker.node for worker in self._gang.workers()}
        missing = [
            "this container" if member is None else nodes.get(member, "?")
            for member in roster.members
            if member not in self._views
        ]
        logs = self._gang.run.logs
        return f"No engine answered within {_ENGINE_S:.0f} s on: {', '.join(missing)}. Logs: {logs}"


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
