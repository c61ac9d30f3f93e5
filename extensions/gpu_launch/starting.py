"""The threads that start a launch: the containers once, the ranks as often as needed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gpu_launch import command, runs
from gpu_launch.errors import GpuLaunchError, LaunchFailed
from gpu_launch.fleet import HEARTBEAT_MISSES, Fleet
from gpu_launch.gang import Gang
from gpu_launch.progress import Ranks
from gpu_launch.request import Checked, build_spec
from gpu_launch.roster import Roster
from gpu_launch.spec import Channel, LaunchSpec, NodeInfo


class Starter:
    """Starts in the background, one start at a time."""

    def __init__(
        self, checked: Checked, run: runs.RunFolder, *, gang: Gang, fleet: Fleet, ranks: Ranks, channel: Channel
    ) -> None:
        self._checked, self._run, self._gang, self._fleet = checked, run, gang, fleet
        self._ranks, self._channel = ranks, channel
        self._threads: list[threading.Thread] = []
        self._given_up = threading.Event()
        #: What went wrong.
        self.problem: BaseException | None = None
        #: The present start, once every node has confirmed it.
        self.spec: LaunchSpec | None = None

    def begin(self) -> None:
        """Ask for the containers, and start the ranks when they are there."""
        settings = {"is_launch": True, "profile_dir": str(self._run.profile), "heartbeat_misses": HEARTBEAT_MISSES}
        if self._checked.request.cell is not None:
            self._run.cell.write_text(self._checked.request.cell)
        self._threads.append(start_thread(lambda: self._gang.begin(settings=settings), self._fail))
        self._start_ranks()

    def again(self) -> None:
        """Start the ranks once more, after `give_up`, on the nodes that are there when it is granted."""
        self.spec = self.problem = None
        self._given_up = threading.Event()
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

    def _start_ranks(self) -> None:
        given_up = self._given_up
        self._threads.append(start_thread(lambda: self._bring_up(given_up), self._fail))

    def _bring_up(self, given_up: threading.Event) -> None:
        spec = self._fleet.up(self._build, given_up=given_up, on_roster=self._set_roster)
        if spec is not None:
            addresses = [info.address for info in self._fleet.infos(spec.roster)]
            (self._run.root / "torchrun.sh").write_text(command.build_by_hand(spec, addresses))
            self.spec = spec

    def _set_roster(self, roster: Roster) -> None:
        self._ranks.roster = roster

    def _build(self, roster: Roster, first: NodeInfo) -> LaunchSpec:
        return build_spec(
            self._checked,
            self._run,
            roster=roster,
            first=first,
            attempt=self._ranks.attempt,
            channel=self._channel,
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
