"""The ranks that stand in this notebook: started once, given cells, renewed when the group is lost, ended."""

from __future__ import annotations

import contextlib
import shlex
import sys
import threading
import time
from collections.abc import Mapping

from gpu_launch import runs
from gpu_launch.errors import GpuLaunchError, LaunchFailed, LaunchInterrupted, UsageError
from gpu_launch.launch import prepare
from gpu_launch.render import nodes_text, span_text
from gpu_launch.standing import interrupts, said, words
from gpu_launch.standing.cell import Cell, CellRun
from gpu_launch.standing.course import Step
from gpu_launch.standing.idle import Idle
from gpu_launch.standing.screen import CellScreen
from gpu_launch.standing.session import Session

_REST_S = 0.05  # seconds between looks at idle ranks, beside the time that a look takes


class Group:
    """One notebook's, at most one at a time. Its methods are for the thread that runs cells."""

    def __init__(self, launch_words: tuple[str, ...], *, before: Mapping[str, str]) -> None:
        self.words = launch_words
        options = words.start_options(launch_words)
        # As a cell's: what the ranks run needs no check, and is the session's to say.
        self._checked, self._broker = prepare(options, cell="", before=before)
        self._screen = CellScreen()
        #: Held by whoever looks at the session.
        self._turn = threading.Lock()
        self._session: Session | None = None
        #: Why there is none, where that is news to the person.
        self._lost = ""
        self._over = threading.Event()
        self._number = 0
        self._began_at = time.monotonic()
        self._is_running = False

    @property
    def stands(self) -> bool:
        """Whether ranks wait for cells, as far as is known."""
        return self._session is not None and not self._session.is_over

    def start(self) -> None:
        """Start the ranks, once; raises what a launch raises, with everything given back."""
        with self._turn:
            self._screen.begin(at_once=True)
            self._start()
        threading.Thread(target=self._watch, name="gpu_launch standing", daemon=True).start()

    def run(self, cell: Cell) -> dict[str, list[object]]:
        """Run a cell; the values that come back, by name, in the order of the ranks.

        Raises LaunchFailed and LaunchInterrupted, which tell whether the group is as before, and UsageError.
        """
        with self._turn:
            self._check_there()
            session = self._session
            assert session is not None  # noqa: S101 - _check_there
            if unknown := [rank for rank in cell.ranks if rank not in session.devices]:
                raise UsageError(f"--ranks {unknown[0]}: there are ranks 0 to {len(session.devices) - 1}.")
            self._number += 1
            self._screen.begin(at_once=False)
            began = time.monotonic()
            outcome = "ended"
            self._is_running = True
            try:
                found = self._run(session, cell)
                outcome = "done"
            finally:
                self._is_running = False
                session.patience.touch(time.monotonic())
                self._screen.rest(f"{outcome} after {span_text(time.monotonic() - began)}")
            return found

    def stop(self) -> str:
        """End the ranks and give their GPUs back; where they were."""
        self._over.set()
        with self._turn:
            session = self._session
            if session is None or session.is_over:
                return ""
            nodes = self._nodes(session)
            # They may have ended in another way meanwhile.
            with contextlib.suppress(GpuLaunchError):
                session.leave()
            session.end("done")
            return nodes

    def abandon(self) -> None:
        """The kernel ends: what holds the ranks is freed by others."""
        self._over.set()
        if self._session is not None:
            self._session.run.lived.unlink(missing_ok=True)

    def describe(self) -> str:
        """Where they are, for a person."""
        session = self._session
        if session is None or session.is_over:
            return f"{self._lost}\nThe next %%gpu_ranks cell starts them anew.\n" if self._lost else said.NOTHING_STANDS
        return said.state_text(
            len(session.devices),
            self._nodes(session),
            stands_s=time.monotonic() - self._began_at,
            idle_s=None if self._is_running else session.patience.idle_s(time.monotonic()),
            flags=shlex.join(self.words),
            logs=self._logs(session),
        )

    def _start(self) -> None:
        began = time.monotonic()
        session = Session(self._checked, self._broker, screen=self._screen)
        try:
            session.begin()
        except KeyboardInterrupt:
            session.end("interrupted")
            raise LaunchInterrupted("no ranks stand, and everything is given back.") from None
        except BaseException:
            session.end("failed")
            raise
        self._session, self._lost = session, ""
        self._began_at = time.monotonic()
        self._screen.write("stdout", f"gpu_launch: {said.stand_text(len(session.devices), self._nodes(session))}\n")
        self._screen.rest(f"started in {span_text(self._began_at - began)}")

    def _check_there(self) -> None:
        """The ranks stand as the cells before left them; else they are started anew, and that is raised."""
        if self._session is not None and not self._session.is_over:
            return
        why = self._lost
        self._screen.begin(at_once=True)
        self._start()
        if why:
            raise LaunchFailed(f"{why}\n{said.RENEWED}")

    def _run(self, session: Session, cell: Cell) -> dict[str, list[object]]:
        run = CellRun(session, cell, number=self._number)
        lost = ""
        with interrupts.counted() as asked:
            run.begin()
            while (step := run.course.step(time.monotonic())) in (Step.WAIT, Step.INTERRUPT):
                if step is Step.INTERRUPT:
                    run.interrupt()
                try:
                    run.look(asked())
                except GpuLaunchError as error:
                    lost = str(error)
                    run.course.die()
            if step is not Step.RENEW:
                try:
                    session.catch_up(run.written)
                    lost = run.find_problem() if step is Step.CHECK else ""
                except GpuLaunchError as error:
                    lost = str(error)
            was_asked = bool(asked())
        if step is Step.RENEW or lost:
            self._renew(session, run, lost, was_asked=was_asked)
        if was_asked:
            raise LaunchInterrupted(f"the cell is stopped on every rank. {said.USABLE}")
        if step is Step.CHECK:
            raise LaunchFailed(f"{said.failure_text(run.ends())}\n{said.USABLE} Logs: {self._logs(session)}")
        return run.collect()

    def _renew(self, session: Session, run: CellRun, lost: str, *, was_asked: bool) -> None:
        """Start all ranks anew, and raise why."""
        ends = said.failure_text(run.ends()) if run.has_news else ""
        why = "\n".join(filter(None, [ends, lost, "" if "Logs: " in lost else f"Logs: {self._logs(session)}"]))
        session.end("renewed", is_final=False)
        self._session = None
        self._screen.begin(at_once=True)
        try:
            self._start()
        except LaunchInterrupted as error:
            raise LaunchInterrupted(f"{why}\n{error}") from None
        except GpuLaunchError as error:
            raise LaunchFailed(f"{why}\n\nThe ranks could not be started anew: {error}") from None
        if was_asked:
            raise LaunchInterrupted(f"the cell is stopped.\n{why}\n{said.RENEWED}")
        raise LaunchFailed(f"{why}\n{said.RENEWED}")

    def _lose(self, session: Session, why: str) -> None:
        """Ranks were lost between cells."""
        self._lost = why
        session.end("lost")

    def _watch(self) -> None:
        """Between cells: show what ranks still say, notice losses, and give idle ranks' GPUs to those who wait."""
        while not self._over.wait(_REST_S):
            with self._turn:
                session = self._session
                if session is None or session.is_over or self._over.is_set():
                    continue
                try:
                    session.look()
                except GpuLaunchError as error:
                    self._lose(session, str(error))
                    _say(f"the standing ranks are lost: {str(error).splitlines()[0]}")
                    continue
            # A broker that is slow to answer holds up no cell.
            if session.patience.is_to_ask(time.monotonic()):
                self._give_way(session, is_wanted=session.anybody_waits())

    def _give_way(self, session: Session, *, is_wanted: bool) -> None:
        with self._turn:
            now = time.monotonic()
            idle = Idle.STAY if session.is_over else session.patience.decide(now, is_wanted=is_wanted)
            if idle is Idle.WARN:
                _say(said.warning_text(session.patience.idle_s(now)))
            elif idle is Idle.END:
                self._lose(session, said.GIVEN_BACK)
                session.free()
                _say("the standing ranks are ended, and their GPUs given to those who wait")

    def _nodes(self, session: Session) -> str:
        return nodes_text(session.crew.gang.workers(), session.crew.own_text)

    def _logs(self, session: Session) -> str:
        return runs.shown(session.run.logs, self._checked.request.env.home)


def _say(text: str) -> None:
    sys.stderr.write(f"gpu_launch: {text}\n")
    sys.stderr.flush()
