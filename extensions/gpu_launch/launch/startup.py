"""The threads that start a launch: its worker pool where that is new, and the ranks as often as needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from gpu_launch.common import run_folder
from gpu_launch.common.launch_spec import Channel, LaunchSpec, Membership, NodeInfo, StartMethod
from gpu_launch.errors import GpuLaunchError, LaunchFailed
from gpu_launch.launch.mixed_gpus import NO_CUDA, describe_mixed_gpus
from gpu_launch.launch.request import ValidatedRequest, build_spec, choose_start_method
from gpu_launch.launch.workers.agent_client import CALL_S
from gpu_launch.launch.workers.worker_pool import WorkerPool
from gpu_launch.output.rank_monitor import RankMonitor
from gpu_launch.worker import agent
from gpu_launch.worker.runners import torchrun

_POLL_S = 0.01  # seconds between polls for a grant
_PREPARE_S = 120.0  # seconds for a node to import torch and the modules of --preload


class RankStarter:
    """Starts ranks in the background, one start at a time."""

    def __init__(
        self,
        validated: ValidatedRequest,
        run: run_folder.RunFolder,
        *,
        pool: WorkerPool,
        ranks: RankMonitor,
        channel: Channel,
        exchange: str = "",
        build_environ: Callable[[], dict[str, str]] = dict,
    ) -> None:
        """`build_environ` returns variables of the ranks that the user has not set; it may wait a moment."""
        self._build_environ = build_environ
        self._validated, self._run, self._pool, self._exchange = validated, run, pool, exchange
        self._ranks, self._channel = ranks, channel
        self._threads: list[threading.Thread] = []
        self._cancelled = threading.Event()
        self._restarts = 0
        #: Why a node cannot fork ranks; empty while none has refused.
        self._refusal = ""
        #: For the user, oldest first.
        self._notes: list[str] = []
        self._error: BaseException | None = None
        self._is_confirmed = self._all_connected = self._was_sent = False

    @property
    def is_confirmed(self) -> bool:
        """Return whether every node has confirmed the current start."""
        return self._is_confirmed

    @property
    def all_connected(self) -> bool:
        """Return whether the engines of all participants of the current start have been connected."""
        return self._all_connected

    @property
    def was_sent(self) -> bool:
        """Return whether an agent was asked to start ranks, in this start or before."""
        return self._was_sent

    def pop_notes(self) -> list[str]:
        """Return the notes for the user that have come since the last call."""
        notes = self._notes[:]
        del self._notes[: len(notes)]
        return notes

    def raise_error(self) -> None:
        """Raise the error of the current start, if it has failed."""
        if self._error is not None:
            raise self._error

    def start(self) -> None:
        """Start the ranks as soon as the worker pool is there; ask for its workers where it is new."""
        if not self._pool.has_started:
            self._run_in_thread(self._pool.start)
        self._start_ranks()

    def restart(self, *, restarts: int) -> None:
        """Start the ranks again, after `cancel`, on the nodes that are there when they are granted."""
        self._is_confirmed = self._all_connected = False
        self._error = None
        self._cancelled = threading.Event()
        self._restarts = restarts
        self._start_ranks()

    def cancel(self) -> None:
        """Let the current start end soon, see `is_busy`."""
        self._cancelled.set()

    def is_busy(self) -> bool:
        """Return whether a start is in progress."""
        return any(thread.is_alive() for thread in self._threads)

    def join(self, limit_s: float | None = None) -> None:
        """Wait for the end of the current start."""
        for thread in self._threads:
            thread.join(limit_s)

    def _run_in_thread(self, target: Callable[[], None]) -> None:
        self._threads.append(start_thread(target, self._fail))

    def _start_ranks(self) -> None:
        cancelled = self._cancelled
        self._run_in_thread(lambda: self._bring_up(cancelled))

    def _bring_up(self, cancelled: threading.Event) -> None:
        agents = self._pool.agents
        agents.start()
        membership = self._await_membership(cancelled)
        if membership is None or not agents.wait_for_participants(membership, cancelled):
            return
        self._all_connected = True
        spec = self._prepare(membership, cancelled)
        if spec is None or cancelled.is_set():
            return
        self._was_sent = True
        calls = [(member, agents.call(member, agent.start_ranks, spec)) for member in membership.participants]
        for member, call in calls:
            agents.wait(member, call, cancelled)
        if cancelled.is_set():
            return
        self._is_confirmed = True
        addresses = [info.address for info in agents.node_infos(spec.membership)]
        (self._run.root / "torchrun.sh").write_text(torchrun.format_commands(spec, addresses))

    def _await_membership(self, cancelled: threading.Event) -> Membership | None:
        """Return who takes part, and discover engines in the meantime; None when cancelled."""
        while (membership := self._pool.membership(self._validated.plan)) is None:
            if cancelled.is_set():
                return None
            self._pool.group.check()
            self._pool.agents.discover()
            time.sleep(_POLL_S)
        self._ranks.membership = membership
        return membership

    def _prepare(self, membership: Membership, cancelled: threading.Event) -> LaunchSpec | None:
        """Return the spec of the start, with every node ready for it; None when cancelled."""
        agents, first = self._pool.agents, membership.participants[0]
        method, reason = choose_start_method(self._validated)
        port = None
        if method is StartMethod.FORK and not self._refusal:
            asked = (self._validated.request.options.preload, dict(self._validated.request.environ))
            calls = [(member, agents.call(member, agent.prepare_forking, *asked)) for member in membership.participants]
            # Requested now as well: an agent works on its calls one after the other.
            store = agents.call(first, agent.open_store, self._run.run_id, self._ranks.attempt)
            refusals = [agents.wait(member, call, cancelled, limit_s=_PREPARE_S) for member, call in calls]
            if cancelled.is_set():
                return None
            self._refusal = next(filter(None, refusals), "")
            port = None if self._refusal else agents.wait(first, store, cancelled)
        if method is StartMethod.FORK and self._refusal:
            method, reason = StartMethod.TORCHRUN, self._refusal
        self._note_method(reason)
        if port is None:
            info = agents.wait(first, agents.call(first, agent.describe_node), cancelled, limit_s=CALL_S)
        else:
            info = replace(agents.node_infos(membership)[0], port=port)
        if info is None or cancelled.is_set():
            return None
        coordinator = agents.wait(first, agents.call(first, agent.find_coordinator_port, info.port), cancelled)
        return None if cancelled.is_set() else self._build(membership, info, method, coordinator)

    def _note_method(self, reason: str) -> None:
        text = f"ranks are started by torchrun itself: {reason}"
        self._note_once(text if reason else "")

    def _note_once(self, text: str) -> None:
        if text and not self._ranks.attempt:
            self._notes.append(text)

    def _build(self, membership: Membership, first: NodeInfo, method: StartMethod, coordinator_port: int) -> LaunchSpec:
        mixed = describe_mixed_gpus(self._pool.agents.node_infos(membership))
        self._note_once(mixed)
        return build_spec(
            self._validated,
            self._run,
            membership=membership,
            first=first,
            coordinator_port=coordinator_port,
            attempt=self._ranks.attempt,
            restarts=self._restarts,
            method=method,
            channel=self._channel,
            exchange=self._exchange,
            environ={**self._build_environ(), **(NO_CUDA if mixed else {})},
        )

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error


def start_thread(target: Callable[[], None], on_error: Callable[[BaseException], None]) -> threading.Thread:
    """Run `target` in a daemon thread; its exception goes to `on_error`, as a GpuLaunchError."""

    def call() -> None:
        try:
            target()
        except GpuLaunchError as error:
            on_error(error)
        except Exception as error:  # noqa: BLE001 - a thread's edge: the launch reports it
            failed = LaunchFailed(f"{type(error).__name__}: {error}")
            failed.__cause__ = error
            on_error(failed)

    thread = threading.Thread(target=call, name="gpu_launch", daemon=True)
    thread.start()
    return thread
