"""A crew's engines: a controller here, an engine on every node, and calls to their agents."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from gpu_launch import agent
from gpu_launch.containers import Containers
from gpu_launch.errors import LaunchFailed
from gpu_launch.roster import Roster
from gpu_launch.spec import NodeInfo
from gpu_launch.way import gone_text

#: Engines prove to be there every 100 ms, so that they are known at once; gone after 10 s of silence.
_PING_MS = 100
_MISSES = 100
_ENGINE_S = 90.0  # seconds for an engine of a running container to register
#: Seconds for a call to an agent.
CALL_S = 20.0
_POLL_S = 0.01  # seconds between looks for new engines
_WAIT_S = 0.05  # seconds between looks for a reason not to wait for an answer any more
_CONTROLLER_S = 5.0  # seconds for the controller to end
_GONE = object()


class Fleet:
    """Members are workers' indexes; None is the notebook's own container. Safe in several threads."""

    def __init__(self, gang: Containers, address: str) -> None:
        self._gang, self._address = gang, address
        self._cluster: Any = None
        self._client: Any = None
        self._lock, self._bringing = threading.RLock(), threading.Lock()
        self._is_down = False
        #: Engines that were asked who they are, and those that have not answered yet.
        self._known: set[int] = set()
        self._asked: dict[int, Any] = {}
        self._views: dict[int | None, Any] = {}
        self._infos: dict[int | None, NodeInfo] = {}

    def up(self) -> None:
        """Start the controller, once; engines find it by the run's folder."""
        with self._bringing:
            if self._is_down:
                raise LaunchFailed("The workers were given back meanwhile.")
            if self._client is None:
                asyncio.run(self._start_cluster())
                self._client = asyncio.run(self._cluster.connect_client())

    def meet(self) -> None:
        """Learn which node each new engine is on. One that is gone meanwhile never answers."""
        with self._lock:
            for engine in self._client.ids:
                if engine not in self._known:
                    self._known.add(engine)
                    view = self._client[engine]
                    if (call := self._apply(view, agent.describe)) is not None:
                        self._asked[engine] = (view, call)
            for engine, (view, call) in list(self._asked.items()):
                if call.ready():
                    del self._asked[engine]
                    info = _answer(call, "a new node")
                    if info is not _GONE:
                        self._views[info.worker], self._infos[info.worker] = view, info

    def has(self, member: int | None) -> bool:
        """Whether this member's engine is there."""
        with self._lock:
            view = self._views.get(member)
            return view is not None and view.targets in self._client.ids

    def await_members(self, roster: Roster, given_up: threading.Event) -> bool:
        """Until every member's engine is there; False when given up before. LaunchFailed where one stays away."""
        deadline = float("inf")
        while not all(map(self.has, roster.members)):
            if given_up.is_set():
                return False
            self._gang.check()
            self.meet()
            if self._gang.is_started():
                deadline = min(deadline, time.monotonic() + _ENGINE_S)
            if time.monotonic() > deadline:
                raise LaunchFailed(self._missing(roster))
            time.sleep(_POLL_S)
        return True

    def ask(self, member: int | None, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a member's agent; the answer is `result`'s to wait for. Raises LaunchFailed."""
        with self._lock:
            call = self._apply(self._views[member], function, *arguments)
        if call is None:
            raise LaunchFailed(self._gone_text(member))
        return call

    def result(
        self, member: int | None, call: Any, given_up: threading.Event | None = None, *, limit_s: float = CALL_S
    ) -> Any:
        """What the agent answered; None when given up before. Raises LaunchFailed."""
        node = self._infos[member].node
        deadline = time.monotonic() + limit_s
        while not call.ready():
            if given_up is not None and given_up.is_set():
                return None
            if time.monotonic() > deadline:
                raise LaunchFailed(f"The agent on {node} did not answer within {limit_s:.0f} s.")
            call.wait(_WAIT_S)
        answer = _answer(call, node)
        if answer is _GONE:
            raise LaunchFailed(self._gone_text(member))
        return answer

    def tell(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function of every agent that is there, without waiting; their answers to come."""
        with self._lock:
            there = self._client.ids if self._client is not None else []
            views = [view for view in self._views.values() if view.targets in there]
            return [call for view in views if (call := self._apply(view, function, *arguments)) is not None]

    def lost(self, roster: Roster) -> frozenset[int | None]:
        """Members whose engines were there and are not any more."""
        with self._lock:
            return frozenset(member for member in roster.members if member in self._views and not self.has(member))

    def forget(self, workers: Iterable[int]) -> None:
        """These workers' containers are gone; other engines may come with the same indexes."""
        with self._lock:
            for worker in workers:
                self._views.pop(worker, None)
                self._infos.pop(worker, None)
            # One that has not said who it is may be gone too, or be here to stay: it is asked again.
            self._known -= self._asked.keys()
            self._asked.clear()

    def infos(self, roster: Roster) -> list[NodeInfo]:
        """What the members' agents said of their containers, by node rank."""
        return [self._infos[member] for member in roster.members]

    def is_up(self) -> bool:
        """Whether the controller runs."""
        controller = self._cluster.controller if self._cluster is not None else None
        return self._client is not None and controller is not None and bool(controller.running)

    def down(self) -> None:
        """Stop the controller; engines are the gang's."""
        with self._bringing:
            self._is_down = True
            if self._client is not None:
                self._client.close()
            if self._cluster is not None:
                with contextlib.suppress(TimeoutError):
                    asyncio.run(asyncio.wait_for(self._cluster.stop_controller(), _CONTROLLER_S))

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
            # A crew frees everything itself; at the interpreter's end it would be too late for ipyparallel to.
            shutdown_atexit=False,
        )
        await self._cluster.start_controller(environment={"IPP_ENABLE_CURVE": "1"})
        await self._cluster.start_engines(self._gang.plan.nnodes, gang=self._gang)

    def _apply(self, view: Any, function: Callable[..., Any], *arguments: Any) -> Any | None:
        """The answer to come; None where the engine was just found to be gone, in the client's own thread."""
        from ipyparallel.error import NoEnginesRegistered

        try:
            return view.apply_async(function, *arguments)
        except (LookupError, NoEnginesRegistered):
            if view.targets in self._client.ids:
                raise
            return None

    def _gone_text(self, member: int | None) -> str:
        return gone_text([self._infos[member].node], logs=self._gang.run.logs)

    def _missing(self, roster: Roster) -> str:
        nodes = {worker.index: worker.node for worker in self._gang.workers()}
        missing = [
            "this container" if member is None else nodes.get(member, "?")
            for member in roster.members
            if not self.has(member)
        ]
        logs = self._gang.run.logs
        return f"No engine answered within {_ENGINE_S:.0f} s on: {', '.join(missing)}. Logs: {logs}"


def _answer(call: Any, node: str) -> Any:
    """What an agent answered; _GONE where its engine ended before."""
    from ipyparallel.error import EngineError, IPythonError

    try:
        return call.get(timeout=CALL_S)
    except IPythonError as error:
        # ipyparallel makes up an answer for an engine that is gone, as if the engine had sent that error itself.
        if EngineError.__name__ in (type(error).__name__, getattr(error, "ename", "")):
            return _GONE
        raise LaunchFailed(f"The agent on {node} failed: {error}") from None


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
