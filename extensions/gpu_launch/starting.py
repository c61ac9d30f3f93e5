"""The threads that start a launch: its crew where that does not stand yet, and the ranks as often as needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from gpu_launch import agent, command, runs
from gpu_launch.crew import Crew
from gpu_launch.errors import GpuLaunchError, LaunchFailed
from gpu_launch.fleet import CALL_S
from gpu_launch.progress import Ranks
from gpu_launch.request import Checked, build_spec, choose_way
from gpu_launch.roster import Roster
from gpu_launch.spec import Channel, LaunchSpec, NodeInfo, Way

_POLL_S = 0.01  # seconds between looks for a grant
_PREPARE_S = 120.0  # seconds for a node to import torch and what else was named


class Starter:
    """Starts in the background, one start at a time."""

    def __init__(
        self, checked: Checked, run: runs.RunFolder, *, crew: Crew, ranks: Ranks, channel: Channel, exchange: str = ""
    ) -> None:
        self._checked, self._run, self._crew, self._exchange = checked, run, crew, exchange
        self._ranks, self._channel = ranks, channel
        self._threads: list[threading.Thread] = []
        self._given_up = threading.Event()
        self._restarts = 0
        self._refused = ""
        #: What is to be said to the person, oldest first.
        self.notes: list[str] = []
        #: What went wrong.
        self.problem: BaseException | None = None
        #: The present start, once every node has confirmed it.
        self.spec: LaunchSpec | None = None
        #: Everybody who takes part in this start was there.
        self.has_met = False
        #: An agent was told to start ranks, in this start or before.
        self.is_told = False

    def begin(self) -> None:
        """Start the ranks as soon as the crew stands; where it does not, ask for it."""
        if not self._crew.is_begun:
            self._run_in_thread(self._crew.begin)
        self._start_ranks()

    def again(self, *, restarts: int) -> None:
        """Start the ranks once more, after `give_up`, on the nodes that are there when it is granted."""
        self.spec = self.problem = None
        self._given_up = threading.Event()
        self.has_met = False
        self._restarts = restarts
        self._start_ranks()

    def give_up(self) -> None:
        """Let the present start end soon, see `is_busy`."""
        self._given_up.set()

    def is_busy(self) -> bool:
        """Whether a start goes on."""
        return any(thread.is_alive() for thread in self._threads)

    def join(self, limit_s: float | None = None) -> None:
        """Wait for the present start's end."""
        for thread in self._threads:
            thread.join(limit_s)

    def _run_in_thread(self, target: Callable[[], None]) -> None:
        self._threads.append(start_thread(target, self._fail))

    def _start_ranks(self) -> None:
        given_up = self._given_up
        self._run_in_thread(lambda: self._bring_up(given_up))

    def _bring_up(self, given_up: threading.Event) -> None:
        fleet = self._crew.fleet
        fleet.up()
        roster = self._await_roster(given_up)
        if roster is None or not fleet.await_members(roster, given_up):
            return
        self.has_met = True
        spec = self._prepare(roster, given_up)
        if spec is None or given_up.is_set():
            return
        self.is_told = True
        calls = [(member, fleet.ask(member, agent.start, spec)) for member in roster.members]
        for member, call in calls:
            fleet.result(member, call, given_up)
        if given_up.is_set():
            return
        self.spec = spec
        addresses = [info.address for info in fleet.infos(spec.roster)]
        (self._run.root / "torchrun.sh").write_text(command.build_by_hand(spec, addresses))

    def _await_roster(self, given_up: threading.Event) -> Roster | None:
        """Who takes part, engines that come meanwhile met; None when given up."""
        while (roster := self._crew.roster(self._checked.plan)) is None:
            if given_up.is_set():
                return None
            self._crew.gang.check()
            self._crew.fleet.meet()
            time.sleep(_POLL_S)
        self._ranks.roster = roster
        return roster

    def _prepare(self, roster: Roster, given_up: threading.Event) -> LaunchSpec | None:
        """The start's spec, with every node ready for it; None when given up."""
        fleet, first = self._crew.fleet, roster.members[0]
        way, reason = choose_way(self._checked)
        port = None
        if way is Way.FORK and not self._refused:
            asked = (self._checked.request.options.preload, dict(self._checked.request.environ))
            calls = [(member, fleet.ask(member, agent.prepare, *asked)) for member in roster.members]
            # Asked in the same breath: an agent does one thing after the other.
            store = fleet.ask(first, agent.open_store, self._run.run_id, self._ranks.attempt)
            refusals = [fleet.result(member, call, given_up, limit_s=_PREPARE_S) for member, call in calls]
            if given_up.is_set():
                return None
            self._refused = next(filter(None, refusals), "")
            port = None if self._refused else fleet.result(first, store, given_up)
        if way is Way.FORK and self._refused:
            way, reason = Way.TORCHRUN, self._refused
        self._tell(reason)
        info = fleet.infos(roster)[0]
        if port is None:
            info = fleet.result(first, fleet.ask(first, agent.describe), given_up, limit_s=CALL_S)
        return None if info is None or given_up.is_set() else self._build(roster, info, way, port)

    def _tell(self, reason: str) -> None:
        text = f"ranks are started by torchrun itself: {reason}"
        if reason and not self._ranks.attempt:
            self.notes.append(text)

    def _build(self, roster: Roster, first: NodeInfo, way: Way, port: int | None) -> LaunchSpec:
        return build_spec(
            self._checked,
            self._run,
            roster=roster,
            first=first if port is None else replace(first, port=port),
            attempt=self._ranks.attempt,
            restarts=self._restarts,
            way=way,
            channel=self._channel,
            exchange=self._exchange,
        )

    def _fail(self, error: BaseException) -> None:
        self.problem = self.problem or error


def start_thread(target: Callable[[], None], on_error: Callable[[BaseException], None]) -> threading.Thread:
    """Run `target` in a daemon thread; what it raises goes to `on_error`, as a GpuLaunchError."""

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
