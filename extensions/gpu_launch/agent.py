"""The agent in a node's engine process: starts ranks, sends their output, passes signals on.

Its functions are called through ipyparallel's `apply`, one at a time; all but `prepare` return at once.
"""

from __future__ import annotations

import os
import signal as signals
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from gpu_launch import command, environment, network, processes, runs, settings
from gpu_launch.ranks import shared_memory, variables
from gpu_launch.ranks.cold import TorchrunRunner
from gpu_launch.ranks.forked import ForkRunner
from gpu_launch.ranks.gpus import Gpus
from gpu_launch.ranks.pump import Pump
from gpu_launch.ranks.runner import Node, Runner
from gpu_launch.ranks.server import Refused, Server, ServerGone, spawn
from gpu_launch.ranks.task import TaskRunner
from gpu_launch.spec import LaunchSpec, NodeInfo, Way

_IMPORT_S = 55.0  # seconds for a fork server to import everything
_KILLED_S = 5.0  # seconds for ranks that were killed to be gone
_SENT_S = 5.0  # seconds for the last output to be taken
_POLL_S = 0.01  # seconds


@dataclass
class _Launch:
    """What was started last."""

    run_id: str
    runner: Runner
    pump: Pump
    thread: threading.Thread
    #: What was in /dev/shm before.
    shared: frozenset[str]


class _Agent:
    """This process's: one start of ranks at a time, and the fork server that is there for all of them."""

    def __init__(self) -> None:
        self.server: Server | None = None
        #: The run for which the container was started, whose folder has the fork server's log.
        self.run_id = environment.read().run_id or ""
        self.launch: _Launch | None = None
        self.gpus = Gpus(environment.read().gpu_uuids)
        #: SIGTERM came to this container, and it ends with its ranks.
        self.is_leaving = False


_agent = _Agent()


def adopt(server: Server, run_id: str) -> None:
    """Use this fork server, started for the run `run_id`."""
    _agent.server, _agent.run_id = server, run_id


def describe() -> NodeInfo:
    """This container, for the plan of a launch."""
    env = environment.read()
    found = network.own(env.subnet, wait_s=1.0)
    return NodeInfo(
        worker=env.worker,
        node=env.node,
        address=found.address,
        interface=found.name,
        port=network.free_port(),
        settings=settings.find(found.name),
    )


def prepare(preload: tuple[str, ...], environ: dict[str, str]) -> str:
    """Wait until ranks can be forked here with `preload` imported and with those of `environ` that count at a start.

    Empty, or why they cannot, in words. Renews the fork server where it is not as a new one would be.
    """
    chosen = environ.get("PYTHON_EXEC") or os.environ.get("PYTHON_EXEC")
    if chosen and Path(chosen).resolve() != Path(os.path.realpath("/proc/self/exe")):
        return f"PYTHON_EXEC names another interpreter, {chosen}"
    deadline = time.monotonic() + _IMPORT_S
    try:
        server = _ready_server(preload, environ, deadline)
        missing = [name for name in preload if name not in server.modules]
        return server.load(missing, max(1.0, deadline - time.monotonic())) if missing else server.wait(0.0)
    except ServerGone as error:
        return str(error)


def _ready_server(preload: tuple[str, ...], environ: dict[str, str], deadline: float) -> Server:
    """The fork server that is there, or a new one; ready, or with a problem."""
    server = _agent.server
    if server is not None:
        try:
            server.wait(max(1.0, deadline - time.monotonic()))
            if server.is_current(environ, preload):
                return server
        except ServerGone:
            pass
        server.end()
    _agent.server = server = spawn(_agent.run_id, environ)
    server.wait(max(1.0, deadline - time.monotonic()))
    return server


def open_store(run_id: str, attempt: int) -> int:
    """Open a fresh store for one start's ranks on this node's address, in place of an earlier one; its port."""
    del run_id, attempt
    if _agent.server is None:
        raise Refused("there is no fork server here: `prepare` comes first")
    return _agent.server.open_store(network.own(environment.read().subnet, wait_s=1.0).address)


def start(spec: LaunchSpec) -> int:
    """Start this node's ranks; the process id of the first, or of what starts them. The rest goes to the channel."""
    if _agent.is_leaving:
        raise RuntimeError("this container is to end")
    earlier = _agent.launch
    if earlier is not None:
        if earlier.runner.poll() is None:
            raise RuntimeError(f"ranks of an earlier start ({earlier.run_id}) still run here")
        _end_pump(earlier)
    node = _build_node(spec)
    shared = earlier.shared if earlier is not None and earlier.run_id == spec.run_id else shared_memory.names()
    try:
        runner = _start_runner(node)
    except OSError as error:
        raise RuntimeError(f"the ranks cannot be started: {error}") from error
    pump = Pump(runner, node, _agent.gpus, is_leaving=lambda: _agent.is_leaving)
    thread = threading.Thread(target=pump.run, name="gpu_launch output", daemon=True)
    _agent.launch = _Launch(run_id=spec.run_id, runner=runner, pump=pump, thread=thread, shared=shared)
    thread.start()
    return runner.pid


def _build_node(spec: LaunchSpec) -> Node:
    env = environment.read()
    found = network.own(env.subnet, wait_s=1.0)
    run, node_rank = runs.folder(env.home, spec.run_id), spec.roster.node_rank(env.worker)
    environ = variables.for_node(
        os.environ,
        spec,
        worker=env.worker,
        settings=settings.find(found.name),
        progress_file=str(run.root / "progress-{rank}.json"),
    )
    return Node(
        spec=spec,
        node_rank=node_rank,
        name=env.node,
        address=found.address,
        worker=env.worker,
        is_capped=env.memory_cap_mib is not None,
        run=run,
        logs=Path(command.node_logs(spec, node_rank)),
        environ=environ,
    )


def _start_runner(node: Node) -> Runner:
    if node.spec.way is Way.TASK:
        return TaskRunner(node)
    if node.spec.way is Way.TORCHRUN:
        return TorchrunRunner(node)
    if _agent.server is None:
        raise Refused("there is no fork server here: `prepare` comes first")
    return ForkRunner(_agent.server, node)


def signal(number: int, run_id: str) -> None:
    """Send a signal to the process groups of the run's ranks. SIGTERM is passed on once."""
    launch = _agent.launch
    if launch is not None and launch.run_id == run_id:
        launch.runner.signal(number)


def kill(run_id: str) -> None:
    """End the run's ranks and whatever they started, at once."""
    launch = _agent.launch
    if launch is None or launch.run_id != run_id:
        processes.kill_marked(_mark(run_id))
        return
    launch.runner.kill()
    deadline = time.monotonic() + _KILLED_S
    while launch.runner.poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    # What was being started when the others were killed.
    processes.kill_marked(_mark(run_id))


def finish(run_id: str) -> None:
    """The run has ended: end what it left in this container. The fork server stays."""
    launch = _agent.launch
    if launch is not None and launch.run_id != run_id:
        return
    kill(run_id)
    if launch is not None:
        _end_pump(launch)
    _agent.launch = None
    if _agent.server is not None:
        _agent.server.close_store()
    if launch is not None:
        shared_memory.sweep(launch.shared)


def _end_pump(launch: _Launch) -> None:
    launch.thread.join(_SENT_S)
    launch.pump.given_up.set()
    launch.thread.join(_SENT_S)


def leave(run_id: str) -> None:
    """SIGTERM came to this container: pass it on, give the ranks the time they take, then end this process.

    Who sent it sets the limit, by killing the container. Safe in a signal's handler. `run_id` is the container's run,
    which need not be that of the ranks.
    """
    del run_id
    if not _agent.is_leaving:
        _agent.is_leaving = True
        threading.Thread(target=_leave, name="gpu_launch leaving", daemon=True).start()


def _leave() -> None:
    launch = _agent.launch
    if launch is not None:
        launch.runner.signal(signals.SIGTERM)
        while launch.runner.poll() is None:
            launch.runner.wait(_POLL_S)
        launch.thread.join(_SENT_S)
    # Nothing of an engine is worth the time that its own end takes.
    os._exit(128 + signals.SIGTERM)


def _mark(run_id: str) -> str:
    return processes.mark(run_id, environment.read().worker)
