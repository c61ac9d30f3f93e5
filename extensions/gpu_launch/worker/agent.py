"""The launch agent in a node's engine process: starts ranks, forwards their output and signals.

The notebook calls these functions through ipyparallel's `apply`, one at a time. All but `prepare_forking` return at
once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal as signals
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_launch import environment
from gpu_launch.common import network, run_folder
from gpu_launch.common.launch_spec import LaunchSpec, NodeInfo, StartMethod
from gpu_launch.errors import LaunchFailed
from gpu_launch.worker import nccl_env, processes, rank_debugger, rank_stacks
from gpu_launch.worker.debugger_client import DebuggerAnswer, DebuggerClient, request_stop
from gpu_launch.worker.forkserver.client import ForkRefused, ForkServerClient, ForkServerGone, start_fork_server
from gpu_launch.worker.gpu_monitor import GpuMonitor
from gpu_launch.worker.output_forwarder import OutputForwarder
from gpu_launch.worker.rank_stops import StopFiles
from gpu_launch.worker.runners import torchrun
from gpu_launch.worker.runners.base import NodeSpec, Runner, build_node_environ
from gpu_launch.worker.runners.command import CommandRunner
from gpu_launch.worker.runners.fork import ForkRunner
from gpu_launch.worker.runners.torchrun import TorchrunRunner

_IMPORT_TIMEOUT_S = 55.0  # seconds for a fork server to import all modules
_KILL_TIMEOUT_S = 5.0  # seconds until killed ranks must be gone
_FLUSH_TIMEOUT_S = 5.0  # seconds for the notebook to receive the last output
_POLL_S = 0.01  # seconds
_DEBUGGER_S = 0.1  # seconds that a call waits for what a debugger writes
#: Folder that the practice closet mounts into containers with a simulated GPU.
SIMULATED_GPUS = Path("/usr/share/nvidia-simulated")


@dataclass
class _RunningRanks:
    """The ranks of the latest start."""

    run_id: str
    runner: Runner
    forwarder: OutputForwarder
    thread: threading.Thread
    #: Names in /dev/shm before the start.
    shm_before: frozenset[str]
    #: The global ranks of this node.
    ranks: range


class _AgentState:
    """State of this process: the ranks of one start at a time, and the fork server that all starts share."""

    def __init__(self) -> None:
        self.fork_server: ForkServerClient | None = None
        #: The run for which the container was started, whose folder has the fork server's log.
        self.run_id = environment.read().run_id or ""
        self.launch: _RunningRanks | None = None
        self.gpu_monitor = GpuMonitor(environment.read().gpu_uuids)
        #: Path of a rank's stack dump, with `{rank}`; empty before the first start.
        self.stacks_pattern = ""
        #: Connections to the debuggers of ranks.
        self.debuggers: dict[int, DebuggerClient] = {}
        #: SIGTERM reached this container; it ends after its ranks.
        self.is_terminating = False


_state = _AgentState()


def adopt_fork_server(server: ForkServerClient, run_id: str) -> None:
    """Use this fork server, which was started for the run `run_id`."""
    _state.fork_server, _state.run_id = server, run_id


def describe_node() -> NodeInfo:
    """Describe this container for the plan of a launch."""
    env = environment.read()
    interface = network.find_own_interface(env.rank_subnet, wait_s=1.0)
    return NodeInfo(
        worker=env.worker,
        node=env.node,
        address=interface.address,
        interface=interface.name,
        port=network.find_free_port(),
        rank_environ=nccl_env.find_variables(interface.name),
        is_simulated=SIMULATED_GPUS.exists(),
    )


def prepare_forking(preload: tuple[str, ...], environ: dict[str, str]) -> str:
    """Wait until this container can fork ranks with `preload` imported and the start variables of `environ` set.

    A fork server that differs from a new one is replaced. Returns the reason for a person if ranks cannot be forked,
    else an empty string.
    """
    interpreter = environ.get("PYTHON_EXEC") or os.environ.get("PYTHON_EXEC")
    if interpreter and Path(interpreter).resolve() != Path(os.path.realpath("/proc/self/exe")):
        return f"PYTHON_EXEC names another interpreter, {interpreter}"
    deadline = time.monotonic() + _IMPORT_TIMEOUT_S
    try:
        server = _ensure_fork_server(preload, environ, deadline)
        missing = [name for name in preload if name not in server.modules]
        return (
            server.import_modules(missing, max(1.0, deadline - time.monotonic()))
            if missing
            else server.wait_until_ready(0.0)
        )
    except ForkServerGone as error:
        return str(error)


def _ensure_fork_server(preload: tuple[str, ...], environ: dict[str, str], deadline: float) -> ForkServerClient:
    """Return the current fork server or a new one; it is ready, or has a problem to report."""
    server = _state.fork_server
    if server is not None:
        try:
            server.wait_until_ready(max(1.0, deadline - time.monotonic()))
            if server.is_current(environ, preload):
                return server
        except ForkServerGone:
            pass
        server.close()
    _state.fork_server = server = start_fork_server(_state.run_id, environ)
    server.wait_until_ready(max(1.0, deadline - time.monotonic()))
    return server


def open_store(run_id: str, attempt: int) -> int:
    """Open a new rendezvous store on this node's address, close the earlier one, and return its port."""
    del run_id, attempt
    if _state.fork_server is None:
        raise ForkRefused("there is no fork server here: call `prepare_forking` first")
    return _state.fork_server.open_store(network.find_own_interface(environment.read().rank_subnet, wait_s=1.0).address)


def find_coordinator_port(store_port: int) -> int:
    """Return a free port for the coordinator of JAX, other than that of a store that may not listen yet."""
    while (port := network.find_free_port()) == store_port:
        pass
    return port


def start_ranks(spec: LaunchSpec) -> int:
    """Start this node's ranks and return the process id of the first one, or of their parent.

    Output and exit codes are sent over the spec's channel.
    """
    if _state.is_terminating:
        raise RuntimeError("this container is shutting down")
    earlier = _state.launch
    if earlier is not None:
        if earlier.runner.poll() is None:
            raise RuntimeError(f"ranks of an earlier start ({earlier.run_id}) still run here")
        _end_forwarder(earlier)
    node = _build_node_spec(spec)
    shared = earlier.shm_before if earlier is not None and earlier.run_id == spec.run_id else processes.list_shm_names()
    try:
        runner = _start_runner(node)
    except OSError as error:
        raise RuntimeError(f"the ranks cannot be started: {error}") from error
    pump = OutputForwarder(
        runner,
        node,
        _state.gpu_monitor,
        is_terminating=lambda: _state.is_terminating,
        stops=StopFiles(_state.stacks_pattern, node.ranks),
    )
    thread = threading.Thread(target=pump.run, name="gpu_launch output", daemon=True)
    _state.launch = _RunningRanks(
        run_id=spec.run_id, runner=runner, forwarder=pump, thread=thread, shm_before=shared, ranks=node.ranks
    )
    thread.start()
    return runner.pid


def _build_node_spec(spec: LaunchSpec) -> NodeSpec:
    env = environment.read()
    interface = network.find_own_interface(env.rank_subnet, wait_s=1.0)
    run, node_rank = run_folder.open_run(env.home, spec.run_id), spec.membership.node_rank(env.worker)
    environ = build_node_environ(
        os.environ,
        spec,
        worker=env.worker,
        settings=nccl_env.find_variables(interface.name),
        progress_file=str(run.root / "progress-{rank}.json"),
        display_file=str(run.root / "displays-{rank}.jsonl") if spec.displays else "",
    )
    _state.stacks_pattern = _state.stacks_pattern or rank_stacks.create_pattern()
    environ[rank_stacks.VARIABLE] = _state.stacks_pattern
    if spec.debug is not None:
        environ[rank_debugger.VARIABLE] = str(spec.debug)
    return NodeSpec(
        spec=spec,
        node_rank=node_rank,
        name=env.node,
        address=interface.address,
        worker=env.worker,
        is_capped=env.memory_cap_mib is not None,
        run=run,
        logs=Path(torchrun.build_node_log_dir(spec, node_rank)),
        environ=environ,
    )


def _start_runner(node: NodeSpec) -> Runner:
    if node.spec.start_method is StartMethod.TASK:
        return CommandRunner(node)
    if node.spec.start_method is StartMethod.TORCHRUN:
        return TorchrunRunner(node)
    if _state.fork_server is None:
        raise ForkRefused("there is no fork server here: call `prepare_forking` first")
    return ForkRunner(_state.fork_server, node)


def collect_stacks(run_id: str) -> list[dict[str, Any]]:
    """Return the stacks of the run's ranks in this container, see `rank_stacks.collect`; empty for none."""
    launch = _state.launch
    if launch is None or launch.run_id != run_id or launch.runner.poll() is not None:
        return []
    return rank_stacks.collect(_state.stacks_pattern, launch.ranks)


def exchange_with_debugger(run_id: str, rank: int, line: str | None) -> dict[str, Any]:
    """Send a line to the debugger of a rank that has stopped, None for none, and return what it has written.

    The first call connects; the answer has the fields of `DebuggerAnswer`.
    """
    launch, client = _state.launch, _state.debuggers.get(rank)
    if launch is None or launch.run_id != run_id or rank not in launch.ranks:
        return asdict(DebuggerAnswer(is_over=True))
    try:
        client = client or DebuggerClient(_dump_path(rank))
    except OSError:
        return asdict(DebuggerAnswer(is_over=True))
    _state.debuggers[rank] = client
    if line is not None:
        client.send_line(line)
    answer = client.receive(_DEBUGGER_S)
    if answer.is_over:
        _close_debugger(rank)
    return asdict(answer)


def continue_ranks(run_id: str, ranks: tuple[int, ...]) -> None:
    """Let ranks that wait for a debugger run on; others are not changed."""
    launch = _state.launch
    if launch is None or launch.run_id != run_id:
        return
    for rank in ranks:
        with contextlib.suppress(OSError):
            DebuggerClient(_dump_path(rank), action="continue").close()


def leave_debugger(run_id: str, rank: int) -> None:
    """Close the connection to a rank's debugger; a rank that waits for a line runs on."""
    launch = _state.launch
    if launch is not None and launch.run_id == run_id:
        _close_debugger(rank)


def stop_rank(run_id: str, rank: int) -> str:
    """Ask a rank to stop for the debugger; return the reason for a person if it cannot, else an empty string."""
    launch = _state.launch
    if launch is None or launch.run_id != run_id or rank not in launch.ranks:
        return f"Rank {rank} does not run."
    try:
        request_stop(_dump_path(rank))
    except LaunchFailed as error:
        return str(error)
    return ""


def _dump_path(rank: int) -> Path:
    return Path(_state.stacks_pattern.replace("{rank}", str(rank)))


def _close_debugger(rank: int) -> None:
    client = _state.debuggers.pop(rank, None)
    if client is not None:
        client.close()


def signal_ranks(number: int, run_id: str) -> None:
    """Send a signal to the process groups of the run's ranks. SIGTERM is forwarded only once."""
    launch = _state.launch
    if launch is not None and launch.run_id == run_id:
        launch.runner.signal(number)


def kill_ranks(run_id: str) -> None:
    """Kill the run's ranks and all processes that they started."""
    launch = _state.launch
    if launch is None or launch.run_id != run_id:
        processes.kill_marked(_build_mark(run_id))
        return
    launch.runner.kill()
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while launch.runner.poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    # Also kills ranks that were still starting when the others were killed.
    processes.kill_marked(_build_mark(run_id))


def finish_run(run_id: str) -> None:
    """Clean up this container after the run. The fork server stays."""
    launch = _state.launch
    if launch is not None and launch.run_id != run_id:
        return
    kill_ranks(run_id)
    if launch is not None:
        _end_forwarder(launch)
    _state.launch = None
    for rank in tuple(_state.debuggers):
        _close_debugger(rank)
    if _state.stacks_pattern:
        shutil.rmtree(Path(_state.stacks_pattern).parent, ignore_errors=True)
        _state.stacks_pattern = ""
    if _state.fork_server is not None:
        _state.fork_server.close_store()
    if launch is not None:
        processes.remove_shm_leftovers(launch.shm_before)


def _end_forwarder(launch: _RunningRanks) -> None:
    launch.thread.join(_FLUSH_TIMEOUT_S)
    launch.forwarder.abandoned.set()
    launch.thread.join(_FLUSH_TIMEOUT_S)


def shut_down(run_id: str) -> None:
    """Forward SIGTERM to the ranks, wait until they have ended, then end this process.

    The sender sets the time limit by killing the container. Safe in a signal handler. `run_id` is the container's run,
    which may differ from the run of the ranks.
    """
    del run_id
    if not _state.is_terminating:
        _state.is_terminating = True
        threading.Thread(target=_end_ranks_and_exit, name="gpu_launch shutdown", daemon=True).start()


def _end_ranks_and_exit() -> None:
    launch = _state.launch
    if launch is not None:
        launch.runner.signal(signals.SIGTERM)
        while launch.runner.poll() is None:
            launch.runner.wait(_POLL_S)
        launch.thread.join(_FLUSH_TIMEOUT_S)
    # A regular interpreter shutdown takes time and has no benefit for an engine.
    os._exit(128 + signals.SIGTERM)


def _build_mark(run_id: str) -> str:
    return processes.build_mark(run_id, environment.read().worker)
