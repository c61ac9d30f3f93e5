"""One start of a session's ranks: their launch, their control connection, and whether idle ranks keep GPUs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from gpu_launch.broker.client import BrokerClient
from gpu_launch.broker.holdings import RANKS
from gpu_launch.common import network, run_folder
from gpu_launch.errors import GpuLaunchError, LaunchFailed
from gpu_launch.launch.launch import Launch
from gpu_launch.launch.request import ValidatedRequest
from gpu_launch.launch.workers.worker_pool import WorkerPool, choose_keep_s, worker_pools
from gpu_launch.output.display_tabs import RankDisplay
from gpu_launch.output.panel import PanelView
from gpu_launch.output.rank_monitor import SILENCE_S
from gpu_launch.output.screens import Screen, find_screen
from gpu_launch.sessions.channel import ControlMessage, ControlServer, CountingReceiver

#: Duration below which a cell shows only its output, seconds.
_SHORT_S = 1.0
_CONTROL, _MODULE = "session.json", "gpu_launch.sessions.rank_main"
_JOIN_TIMEOUT_S = 180.0  # seconds for all started ranks to join the group
_PING_S = 1.0  # seconds between pings of the ranks
_DISCONNECTED_S = (
    3.0  # seconds without a connection until a rank counts as gone, if its node has reported its end; else SILENCE_S
)
_EXIT_TIMEOUT_S = 5.0  # seconds for ranks to exit
_QUIET_S = 1.0  # seconds without new output after which a cell's missing output is given up
_QUIET_DISPLAYS_S = 6.0  # the same where only displays are missing: the agent delays those of a rank with large ones
_NETWORK_S = 2.0
#: Shortest time in seconds for which workers are kept, because restarted ranks use the same ones.
_MIN_KEEP_S = 60
#: Seconds between the warning of idle ranks and their end.
NOTICE_S = 60.0
#: Seconds between queries whether others wait for GPUs.
_ASK_PERIOD_S = 5.0


@dataclass(frozen=True, kw_only=True)
class SessionKind:
    """What ranks a session has, and when they release their GPUs."""

    #: The name of its job, see `broker.holdings`.
    job_name: str
    #: More arguments of `rank_main`.
    arguments: tuple[str, ...] = ()
    #: Lines show which rank wrote them.
    shows_ranks: bool = True
    #: Its workers stay for other launches after its end.
    keeps_workers: bool = True
    build_policy: Callable[[float, float], IdlePolicy]


class RankSession:
    """One start of the ranks: started once, closed once. Not thread-safe."""

    def __init__(
        self, validated: ValidatedRequest, broker: BrokerClient | None, *, screen: CellScreen, kind: SessionKind
    ) -> None:
        env = validated.request.env
        #: Seconds for which idle ranks keep their GPUs while others wait, and for which their workers stay afterwards.
        self.keep_s = choose_keep_s(validated.request.options, env)
        self._status_broker = (
            BrokerClient.for_notebook(env, retry_limit_s=0.0) if env.broker_url and env.token else None
        )
        self.run = run_folder.create_run(env.home)
        path = self.run.root / _CONTROL
        arguments = (str(path), *kind.arguments)
        validated = _build_session_request(validated, arguments, keep_s=max(_MIN_KEEP_S, round(self.keep_s)))
        self.pool: WorkerPool = worker_pools.acquire(validated, broker, name=kind.job_name)
        #: Seconds for which the workers stay after the end.
        self._final_keep_s = self.keep_s if kind.keeps_workers else 0.0
        self.pool.was_announced = self.pool.was_announced or self._final_keep_s < _MIN_KEEP_S
        try:
            address = network.find_own_interface(env.subnet, wait_s=_NETWORK_S).address
            self._control = ControlServer(address)
            self._control.write_credentials(path)
            receiver = CountingReceiver(address, self._control)
            self._output_counter = receiver.counter
            self._launch = Launch(
                validated,
                pool=self.pool,
                run=self.run,
                sink=receiver,
                screen=screen,
                shows_ranks=kind.shows_ranks,
            )
        except BaseException:
            worker_pools.release(self.pool, keep_s=0)
            raise
        #: Node and device of every rank that has joined.
        self.nodes: dict[int, str] = {}
        self.devices: dict[int, str] = {}
        self._per_node = validated.plan.nproc_per_node
        self._ranks = validated.plan.nnodes * validated.plan.nproc_per_node
        self._pinged_at = 0.0
        self._missed_since: dict[int, float] = {}
        self.is_closed = False
        self.idle_policy = kind.build_policy(self.keep_s, time.monotonic())

    def start(self) -> None:
        """Start the ranks and wait until all have joined the group.

        Raises:
            LaunchFailed: Ranks failed or did not join. Other exceptions are those of `Launch.run`.
        """
        self._launch.begin()
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while len(self.devices) < self._ranks:
            for message in self.poll():
                self._record_joined(message)
            if time.monotonic() > deadline:
                missing = [rank for rank in range(self._ranks) if rank not in self.devices]
                raise LaunchFailed(f"ranks {missing} have not joined the process group within {_JOIN_TIMEOUT_S:.0f} s.")
        self.run.root.joinpath(_CONTROL).unlink(missing_ok=True)
        self.end_cell()

    def start_cell(self) -> None:
        """Note that a cell runs from now on."""
        self._launch.ranks.start_cell()
        self._launch.set_idle(False)

    def end_cell(self) -> None:
        """Note that the ranks wait for a cell from now on."""
        self._launch.set_idle(True)
        self.idle_policy.record_cell(time.monotonic())

    def _record_joined(self, message: ControlMessage) -> None:
        if message.header["kind"] == "hello":
            self.nodes[message.rank] = message.header["node"]
        elif message.header["kind"] == "ready":
            if message.header["error"]:
                node = self.nodes.get(message.rank, "?")
                raise LaunchFailed(
                    f"rank {message.rank} on {node} could not join the process group:\n\n{message.header['error']}"
                )
            self.devices[message.rank] = message.header["device"]

    def send(self, rank: int, header: dict[str, Any], frames: Sequence[bytes] = ()) -> None:
        """Send a message to a rank; `poll` notices ranks that are gone."""
        self._control.send(ControlMessage(rank=rank, header=header, frames=tuple(frames)))

    def poll(self) -> list[ControlMessage]:
        """Return the ranks' messages and show their output.

        Raises:
            LaunchFailed: A rank is gone.
        """
        messages = self._control.receive(0)
        if not self._launch.step():
            raise LaunchFailed("All ranks have ended without an error.")
        self._ping()
        return [*messages, *self._control.receive(0)]

    def debug(self, rank: int) -> None:
        """Debug a rank that runs no cell, where its last cell failed.

        Raises:
            GpuLaunchError: It cannot be stopped.
        """
        self._launch.debug(rank)

    def drain_output(self, written: dict[int, Sequence[int]]) -> None:
        """Show all output up to these sizes of stdout and stderr and numbers of displays; give up when none arrives."""
        for rank, sizes in written.items():
            self._output_counter.expect(rank, sizes)
        total, since = self._output_counter.total_bytes, time.monotonic()
        while not self._output_counter.is_complete():
            has_text = self._output_counter.is_complete(with_displays=False)
            if time.monotonic() - since > (_QUIET_DISPLAYS_S if has_text else _QUIET_S):
                break
            self._launch.step()
            if self._output_counter.total_bytes != total:
                total, since = self._output_counter.total_bytes, time.monotonic()
        self._launch.drain()

    def others_are_waiting(self) -> bool:
        """Return whether others, or a launch of this notebook, wait for GPUs that these ranks may use. Thread-safe."""
        group = self.pool.group
        if self._status_broker is None or group.is_notebook_only or group.job is None:
            return False
        if worker_pools.has_waiting():
            return True
        nodes = frozenset(worker.node for worker in group.workers())
        try:
            return self._status_broker.get_cluster().is_wanted(nodes, owner=group.job.owner)
        except GpuLaunchError:
            # A restart of the broker is not a reason to release GPUs.
            return False

    def release_workers(self) -> None:
        """Release the workers at once after the end, whatever their keep time."""
        # If the request fails, the broker frees them when their job is not renewed any more.
        with contextlib.suppress(GpuLaunchError):
            if not self.pool.is_freed:
                worker_pools.release(self.pool, keep_s=0)

    def end_ranks(self) -> None:
        """Let the ranks exit normally, with their exit functions. Takes at most some seconds."""
        for rank in self.devices:
            self.send(rank, {"kind": "end"})
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        while time.monotonic() < deadline and self._launch.step():
            pass

    def close(self, outcome: str, *, is_final: bool = True) -> None:
        """End the remaining ranks and release their workers; pass `is_final=False` if new ranks follow at once."""
        if self.is_closed:
            return
        self.is_closed = True
        self._launch.end(outcome)
        self._control.close()
        if is_final and self._final_keep_s < _MIN_KEEP_S and not self.pool.is_freed:
            worker_pools.release(self.pool, keep_s=self._final_keep_s)

    def _ping(self) -> None:
        """Detect ranks that have ended without an error: for the launch they are done."""
        now, ended = time.monotonic(), self._launch.ranks.ended_nodes()
        if now - self._pinged_at < _PING_S:
            return
        self._pinged_at = now
        for rank in self.devices:
            # Wait for the agent's report first, in case the rank failed.
            limit_s = _DISCONNECTED_S if rank // self._per_node in ended else SILENCE_S
            if self._control.send(ControlMessage(rank=rank, header={"kind": "ping"})):
                self._missed_since.pop(rank, None)
            elif now - self._missed_since.setdefault(rank, now) >= limit_s:
                raise LaunchFailed(f"rank {rank} on {self.nodes[rank]} has ended without an error (os._exit?).")


class CellScreen:
    """A `Screen` that starts again with every cell."""

    def __init__(self) -> None:
        self._screen: Screen = find_screen()
        self._shown_from: float | None = None
        self._has_shown = False

    def start_cell(self, *, at_once: bool) -> None:
        """Start a cell. Its progress is shown `at_once`, or when the cell has taken a moment."""
        self._screen, self._has_shown = find_screen(), False
        self._shown_from = time.monotonic() + (0.0 if at_once else _SHORT_S)

    def end_cell(self, text: str = "") -> None:
        """End the cell; `text` replaces the progress, if that was shown."""
        if self._has_shown and text:
            self._screen.show_progress(text)
            self._screen.show_panel(PanelView(is_closing=True))
        self._shown_from = None

    def show_progress(self, text: str, *, phase: str = "") -> None:
        if self._is_shown():
            self._has_shown = True
            self._screen.show_progress(text, phase=phase)

    def show_panel(self, view: PanelView) -> None:
        if self._is_shown():
            self._screen.show_panel(view)

    def write(self, stream: str, text: str) -> None:
        self._screen.write(stream, text)

    def flush(self) -> None:
        self._screen.flush()

    def show_displays(self, displays: Sequence[RankDisplay], *, last: bool = False) -> None:
        self._screen.show_displays(displays, last=last)

    def _is_shown(self) -> bool:
        return self._shown_from is not None and time.monotonic() >= self._shown_from


def _build_session_request(validated: ValidatedRequest, arguments: tuple[str, ...], *, keep_s: int) -> ValidatedRequest:
    """Return the request for a launch of the module that every rank runs."""
    launch_options = validated.request.options
    options = replace(launch_options, module=True, script=_MODULE, arguments=arguments, keep_s=keep_s)
    return replace(validated, script=_MODULE, request=replace(validated.request, cell=None, options=options))


class IdleAction(Enum):
    """The action for ranks that run no cell."""

    KEEP = auto()
    WARN = auto()
    END = auto()


class IdlePolicy:
    """Keeps idle ranks, which hold the user's data, until others wait for GPUs and no cell has run for `keep_s`."""

    def __init__(self, keep_s: float, now: float) -> None:
        self._keep_s, self._since = keep_s, now
        self._asked_at = float("-inf")
        self._warned_at: float | None = None

    def record_cell(self, now: float) -> None:
        """Record that a cell has run."""
        self._since, self._warned_at = now, None

    def seconds_idle(self, now: float) -> float:
        """Return the seconds since the last cell."""
        return now - self._since

    def should_ask(self, now: float) -> bool:
        """Return whether it matters now if others wait; then False for some seconds."""
        if self.seconds_idle(now) < self._keep_s - NOTICE_S or now - self._asked_at < _ASK_PERIOD_S:
            return False
        self._asked_at = now
        return True

    def decide(self, now: float, *, others_wait: bool) -> IdleAction:
        """Return the action, given whether others wait for GPUs. END only follows a WARN."""
        if not others_wait or self.seconds_idle(now) < self._keep_s - NOTICE_S:
            return IdleAction.KEEP
        if self._warned_at is None:
            self._warned_at = now
            return IdleAction.WARN
        is_over = now - self._warned_at >= NOTICE_S and self.seconds_idle(now) >= self._keep_s
        return IdleAction.END if is_over else IdleAction.KEEP


#: The ranks of `%%gpu_ranks`.
RANK_SESSION = SessionKind(job_name=RANKS, build_policy=IdlePolicy)
