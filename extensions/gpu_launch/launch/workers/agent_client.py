"""The client for the agents of a worker pool: a controller here, an engine on every node, and calls to their agents."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from gpu_launch.common.launch_spec import Membership, NodeInfo
from gpu_launch.errors import LaunchFailed
from gpu_launch.launch.membership import format_silent_nodes
from gpu_launch.launch.workers import ipp_controller
from gpu_launch.launch.workers.worker_group import WorkerGroup
from gpu_launch.worker import agent

#: Engines send a heartbeat every 100 ms, so that they are noticed at once; they are gone after 10 s of silence.
_PING_MS = 100
_MISSES = 100
_ENGINE_S = 90.0  # seconds for an engine of a running container to register
#: Seconds for a call to an agent.
CALL_S = 20.0
_POLL_S = 0.01  # seconds between polls for new engines
_WAIT_S = 0.05  # seconds between checks whether to stop waiting for an answer
_CONTROLLER_S = 5.0  # seconds for the controller to end
_GONE = object()


class AgentClient:
    """Calls to the agents. A participant is a worker's index, or None for the notebook's own container. Thread-safe."""

    def __init__(self, group: WorkerGroup, address: str) -> None:
        self._group, self._address = group, address
        self._cluster: Any = None
        self._client: Any = None
        self._lock, self._life_cycle = threading.RLock(), threading.Lock()
        self._is_stopped = False
        #: Engines whose description was requested, and the calls of those that have not answered yet.
        self._known: set[int] = set()
        self._asked: dict[int, Any] = {}
        self._views: dict[int | None, Any] = {}
        self._infos: dict[int | None, NodeInfo] = {}

    def start(self) -> None:
        """Start the controller, once; engines find it by the run's folder."""
        with self._life_cycle:
            if self._is_stopped:
                raise LaunchFailed("The workers were released in the meantime.")
            if self._client is None:
                asyncio.run(self._start_cluster())
                self._client = asyncio.run(self._cluster.connect_client())

    def discover(self) -> None:
        """Ask each new engine for its node. One that is gone in the meantime never answers."""
        with self._lock:
            for engine in self._client.ids:
                if engine not in self._known:
                    self._known.add(engine)
                    view = self._client[engine]
                    if (call := self._apply(view, agent.describe_node)) is not None:
                        self._asked[engine] = (view, call)
            for engine, (view, call) in list(self._asked.items()):
                if call.ready():
                    del self._asked[engine]
                    info = _answer(call, "a new node")
                    if info is not _GONE:
                        self._views[info.worker], self._infos[info.worker] = view, info

    def is_connected(self, participant: int | None) -> bool:
        """Return whether this participant's engine is connected."""
        with self._lock:
            view = self._views.get(participant)
            return view is not None and view.targets in self._client.ids

    def wait_for_participants(self, membership: Membership, cancelled: threading.Event) -> bool:
        """Wait until every participant's engine is connected; return False when cancelled before.

        Raises:
            LaunchFailed: naming the nodes whose engines did not connect.
        """
        deadline = float("inf")
        while not all(map(self.is_connected, membership.participants)):
            if cancelled.is_set():
                return False
            self._group.check()
            self.discover()
            if self._group.is_started():
                deadline = min(deadline, time.monotonic() + _ENGINE_S)
            if time.monotonic() > deadline:
                raise LaunchFailed(self._format_missing(membership))
            time.sleep(_POLL_S)
        return True

    def call(self, participant: int | None, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a participant's agent; `wait` returns the answer.

        Raises:
            LaunchFailed: when its engine is gone.
        """
        with self._lock:
            call = self._apply(self._views[participant], function, *arguments)
        if call is None:
            raise LaunchFailed(self._gone_text(participant))
        return call

    def wait(
        self, participant: int | None, call: Any, cancelled: threading.Event | None = None, *, limit_s: float = CALL_S
    ) -> Any:
        """Return the agent's answer; None when cancelled before.

        Raises:
            LaunchFailed: when the agent fails, its engine is gone, or the time is over.
        """
        node = self._infos[participant].node
        deadline = time.monotonic() + limit_s
        while not call.ready():
            if cancelled is not None and cancelled.is_set():
                return None
            if time.monotonic() > deadline:
                raise LaunchFailed(f"The agent on {node} did not answer within {limit_s:.0f} s.")
            call.wait(_WAIT_S)
        answer = _answer(call, node)
        if answer is _GONE:
            raise LaunchFailed(self._gone_text(participant))
        return answer

    def broadcast(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function of every connected agent, without waiting; return the calls."""
        with self._lock:
            connected = self._client.ids if self._client is not None else []
            views = [view for view in self._views.values() if view.targets in connected]
            return [call for view in views if (call := self._apply(view, function, *arguments)) is not None]

    def missing(self, membership: Membership) -> frozenset[int | None]:
        """Return the participants whose engines were connected and are not any more."""
        with self._lock:
            return frozenset(
                participant
                for participant in membership.participants
                if participant in self._views and not self.is_connected(participant)
            )

    def forget(self, workers: Iterable[int]) -> None:
        """Forget workers whose containers are gone; other engines may come with the same indexes."""
        with self._lock:
            for worker in workers:
                self._views.pop(worker, None)
                self._infos.pop(worker, None)
            # An engine without a description may be gone too, or may stay: it is asked again.
            self._known -= self._asked.keys()
            self._asked.clear()

    def node_infos(self, membership: Membership) -> list[NodeInfo]:
        """Return the agents' descriptions of their containers, by node rank."""
        return [self._infos[participant] for participant in membership.participants]

    def is_running(self) -> bool:
        """Return whether the controller is running."""
        controller = self._cluster.controller if self._cluster is not None else None
        return self._client is not None and controller is not None and bool(controller.running)

    def stop(self) -> None:
        """Stop the controller; the worker group ends the engines."""
        with self._life_cycle:
            self._is_stopped = True
            if self._client is not None:
                self._client.close()
            if self._cluster is not None:
                with contextlib.suppress(TimeoutError):
                    asyncio.run(asyncio.wait_for(self._cluster.stop_controller(), _CONTROLLER_S))

    async def _start_cluster(self) -> None:
        import ipyparallel
        from traitlets.config import Config

        from gpu_launch.launch.ipp_launcher import GpuhubEngineSetLauncher

        log = logging.getLogger("gpu_launch.ipyparallel")
        log.setLevel(logging.CRITICAL)
        config = Config()
        config.LocalControllerLauncher.controller_cmd = list(ipp_controller.COMMAND)
        profile = str(self._group.run.profile)
        self._cluster = ipyparallel.Cluster(
            engines=GpuhubEngineSetLauncher,
            config=config,
            load_profile=False,
            profile_dir=profile,
            cluster_id="",
            cluster_file="",
            log=log,
            controller_args=controller_arguments(self._address),
            # The launcher publishes the connection itself, so that controller and containers start at the same time.
            send_engines_connection_env=False,
            # A worker pool frees everything itself; at the interpreter's end ipyparallel would be too late.
            shutdown_atexit=False,
        )
        await self._cluster.start_controller(environment={"IPP_ENABLE_CURVE": "1"})
        await self._cluster.start_engines(self._group.plan.nnodes, group=self._group)

    def _apply(self, view: Any, function: Callable[..., Any], *arguments: Any) -> Any | None:
        """Return the call; None where the client's own thread has just noticed that the engine is gone."""
        from ipyparallel.error import NoEnginesRegistered

        try:
            return view.apply_async(function, *arguments)
        except (LookupError, NoEnginesRegistered):
            if view.targets in self._client.ids:
                raise
            return None

    def _gone_text(self, participant: int | None) -> str:
        return format_silent_nodes([self._infos[participant].node], logs=self._group.run.logs)

    def _format_missing(self, membership: Membership) -> str:
        nodes = {worker.index: worker.node for worker in self._group.workers()}
        missing = [
            "this container" if participant is None else nodes.get(participant, "?")
            for participant in membership.participants
            if not self.is_connected(participant)
        ]
        logs = self._group.run.logs
        return f"No engine answered within {_ENGINE_S:.0f} s on: {', '.join(missing)}. Logs: {logs}"


def _answer(call: Any, node: str) -> Any:
    """Return an agent's answer; _GONE where its engine has ended."""
    from ipyparallel.error import EngineError, IPythonError

    try:
        return call.get(timeout=CALL_S)
    except IPythonError as error:
        # For an engine that is gone, ipyparallel invents an answer, as if the engine had sent that error.
        if EngineError.__name__ in (type(error).__name__, getattr(error, "ename", "")):
            return _GONE
        raise LaunchFailed(f"The agent on {node} failed: {error}") from None


def controller_arguments(address: str) -> list[str]:
    """Return the arguments of a controller with its engine side on `address` and its client side on loopback."""
    return [
        f"--IPController.engine_ip={address}",
        f"--location={address}",
        f"--ping={_PING_MS}",
        f"--HeartMonitor.max_heartmonitor_misses={_MISSES}",
        # A launch calls engines one by one, so it needs no broadcast schedulers.
        "--IPController.broadcast_scheduler_depth=0",
        "--nodb",
    ]
