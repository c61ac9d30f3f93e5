"""The rank session of this notebook: starts ranks, runs cells, restarts ranks of a lost group, ends them."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from gpu_launch.common import run_folder
from gpu_launch.errors import GpuLaunchError, LaunchFailed, LaunchInterrupted, UsageError
from gpu_launch.launch.notebook_launch import prepare
from gpu_launch.options import command
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.options.rank_session import NO_SESSION
from gpu_launch.output.text import format_count, format_exact_span, format_nodes
from gpu_launch.sessions.cell import CellRequest, CellRun, CellStep, format_failure
from gpu_launch.sessions.session import (
    NOTICE_S,
    RANK_SESSION,
    CellScreen,
    IdleAction,
    RankSession,
    SessionKind,
)
from gpu_launch.units import format_span

_POLL_S = 0.05  # seconds between polls of idle ranks
_USABLE = "The process group is usable, and all variables are kept."
_RESTARTED = (
    "The ranks were restarted with a new process group: all their variables are gone. "
    "Run the cells that make them again."
)
_RELEASED = "The ranks were ended because others waited for GPUs and no cell ran: their variables are gone."


class SessionManager:
    """The one rank session of a notebook. Its methods are for the thread that runs cells."""

    kind: ClassVar[SessionKind] = RANK_SESSION

    def __init__(self, options: LaunchOptions, *, before: Mapping[str, str]) -> None:
        self.options = options
        # The ranks run a module of gpu_launch, so the script needs no check, as with a cell.
        self._validated, self._broker = prepare(options, cell="", before=before)
        self._screen = CellScreen()
        #: Held while the session is used.
        self._lock = threading.Lock()
        self._session: RankSession | None = None
        #: Reason why the ranks are gone; empty if the user knows it.
        self._loss = ""
        self._is_stopped = threading.Event()
        self._number = 0
        self._began_at = time.monotonic()
        self._is_running = False

    @property
    def is_active(self) -> bool:
        """Return whether ranks wait for cells, as far as known."""
        return self._session is not None and not self._session.is_closed

    def start(self) -> None:
        """Start the ranks, once. If that fails, their GPUs are released and the launch's exception is raised."""
        with self._lock:
            self._screen.start_cell(at_once=True)
            self._start()
        self._start_watch()

    def run_cell(self, cell: CellRequest) -> dict[str, list[object]]:
        """Run a cell; return its values by name, in the order of the ranks.

        Raises:
            LaunchFailed: The cell failed; the text says whether the group is usable.
            LaunchInterrupted: The user interrupted the cell; the text says the same.
            UsageError: `--ranks` names a rank that does not exist.
        """
        with self._lock:
            cell = self._prepare(cell)
            self._ensure_started()
            session = self._session
            assert session is not None  # noqa: S101 - _check_there
            if unknown := [rank for rank in cell.ranks if rank not in session.devices]:
                raise UsageError(f"--ranks {unknown[0]}: there are ranks 0 to {len(session.devices) - 1}.")
            self._number += 1
            self._screen.start_cell(at_once=False)
            started_at = time.monotonic()
            outcome = "ended"
            self._is_running = True
            session.start_cell()
            try:
                values = self._run(session, cell)
                outcome = "done"
            finally:
                self._is_running = False
                session.end_cell()
                self._screen.end_cell(f"{outcome} after {format_exact_span(time.monotonic() - started_at)}")
            return values

    def debug(self, rank: int) -> None:
        """Show in the debugger where the last cell of a rank failed.

        Raises:
            UsageError: There is no such rank.
        """
        with self._lock:
            session = self._session
            if session is None or session.is_closed:
                raise UsageError(self._loss or "No ranks are running: %%gpu_ranks starts them.")
            if rank not in session.devices:
                raise UsageError(f"%gpu_debug {rank}: there are ranks 0 to {len(session.devices) - 1}.")
            session.debug(rank)

    def stop(self) -> str:
        """End the ranks and release their GPUs; return their nodes."""
        self._is_stopped.set()
        with self._lock:
            session = self._session
            if session is None or session.is_closed:
                return ""
            nodes = self._nodes(session)
            # They may have ended already.
            with contextlib.suppress(GpuLaunchError):
                session.end_ranks()
            session.close("done")
            return nodes

    def abandon(self) -> None:
        """Prepare for the end of the kernel; the broker frees the ranks' GPUs."""
        self._is_stopped.set()
        if self._session is not None:
            self._session.run.heartbeat.unlink(missing_ok=True)

    def describe(self) -> str:
        """Describe the session for a person."""
        session = self._session
        if session is None or session.is_closed:
            return f"{self._loss}\nThe next %%gpu_ranks cell restarts them.\n" if self._loss else NO_SESSION
        return _format_state(
            len(session.devices),
            self._nodes(session),
            age_s=time.monotonic() - self._began_at,
            idle_s=None if self._is_running else session.idle_policy.seconds_idle(time.monotonic()),
            flags=shlex.join(command.format_flags(self.options)),
            logs=self._logs(session),
        )

    def _start_watch(self) -> None:
        threading.Thread(target=self._watch, name="gpu_launch session", daemon=True).start()

    def _start(self) -> None:
        started_at = time.monotonic()
        session = RankSession(self._validated, self._broker, screen=self._screen, kind=self.kind)
        try:
            session.start()
        except KeyboardInterrupt:
            session.close("interrupted")
            raise LaunchInterrupted("no ranks are running, and all GPUs are released.") from None
        except BaseException:
            session.close("failed")
            raise
        self._session, self._loss = session, ""
        self._began_at = time.monotonic()
        self._screen.write("stdout", f"gpu_launch: {self._format_started(session)}\n")
        self._screen.end_cell(f"started in {format_exact_span(self._began_at - started_at)}")

    def _prepare(self, cell: CellRequest) -> CellRequest:
        """Return the request as it is sent; called before ranks are started."""
        return cell

    def _ensure_started(self) -> None:
        """Restart the ranks if they are gone.

        Raises:
            LaunchFailed: They were restarted, so the variables of earlier cells are lost.
        """
        if self._session is not None and not self._session.is_closed:
            return
        reason = self._loss
        self._screen.start_cell(at_once=True)
        self._start()
        if reason:
            raise LaunchFailed(f"{reason}\n{_RESTARTED}")

    def _run(self, session: RankSession, cell: CellRequest) -> dict[str, list[object]]:
        run = CellRun(session, cell, number=self._number)
        lost = ""
        with count_interrupts() as interrupts:
            run.send()
            while (step := run.state_machine.next_step(time.monotonic())) in (CellStep.WAIT, CellStep.INTERRUPT):
                if step is CellStep.INTERRUPT:
                    run.interrupt()
                try:
                    run.poll(interrupts())
                except GpuLaunchError as error:
                    lost = str(error)
                    run.state_machine.mark_lost()
            if step is not CellStep.RESTART:
                try:
                    session.drain_output(run.written)
                    lost = run.check_group() if step is CellStep.CHECK else ""
                except GpuLaunchError as error:
                    lost = str(error)
            was_interrupted = bool(interrupts())
        if step is CellStep.RESTART or lost:
            self._restart(session, run, lost, was_interrupted=was_interrupted)
        self._receive_variables(session, run)
        self._raise_end(session, run, step, was_interrupted=was_interrupted)
        return run.collect()

    def _receive_variables(self, session: RankSession, run: CellRun) -> None:
        """Wait for what the ranks send after the end of a cell."""

    def _raise_end(self, session: RankSession, run: CellRun, step: CellStep, *, was_interrupted: bool) -> None:
        """Raise the reason why a cell did not end well, if it did not."""
        if was_interrupted:
            raise LaunchInterrupted(f"the cell is stopped on every rank. {_USABLE}")
        if step is CellStep.CHECK:
            raise LaunchFailed(f"{format_failure(run.ends())}\n{_USABLE} Logs: {self._logs(session)}")

    def _restart(self, session: RankSession, run: CellRun, lost: str, *, was_interrupted: bool) -> None:
        """Restart all ranks, and raise the reason."""
        ends = format_failure(run.ends()) if run.has_failures else ""
        reason = "\n".join(filter(None, [ends, lost, "" if "Logs: " in lost else f"Logs: {self._logs(session)}"]))
        session.close("renewed", is_final=False)
        self._session = None
        self._screen.start_cell(at_once=True)
        try:
            self._start()
        except LaunchInterrupted as error:
            raise LaunchInterrupted(f"{reason}\n{error}") from None
        except GpuLaunchError as error:
            raise LaunchFailed(f"{reason}\n\nThe ranks could not be restarted: {error}") from None
        if was_interrupted:
            raise LaunchInterrupted(f"the cell is stopped.\n{reason}\n{_RESTARTED}")
        raise LaunchFailed(f"{reason}\n{_RESTARTED}")

    def _mark_lost(self, session: RankSession, reason: str) -> None:
        """Record that ranks were lost between cells."""
        self._loss = reason
        session.close("lost")

    def _watch(self) -> None:
        """Between cells: show ranks' output, detect lost ranks, and release idle ranks' GPUs when others wait."""
        while not self._is_stopped.wait(_POLL_S):
            with self._lock:
                session = self._session
                if session is None or session.is_closed or self._is_stopped.is_set():
                    continue
                try:
                    session.poll()
                except GpuLaunchError as error:
                    self._mark_lost(session, str(error))
                    print_note(f"the rank session is lost: {str(error).splitlines()[0]}")
                    continue
            # A slow broker must not delay a cell.
            if session.idle_policy.should_ask(time.monotonic()):
                self._yield_gpus(session, others_wait=session.others_are_waiting())

    def _yield_gpus(self, session: RankSession, *, others_wait: bool) -> None:
        with self._lock:
            now = time.monotonic()
            idle = IdleAction.KEEP if session.is_closed else session.idle_policy.decide(now, others_wait=others_wait)
            if idle is IdleAction.WARN:
                print_note(_format_idle_warning(session.idle_policy.seconds_idle(now)))
            elif idle is IdleAction.END:
                self._release(session, others_wait=others_wait)

    def _release(self, session: RankSession, *, others_wait: bool) -> None:
        """End the idle ranks and release their GPUs."""
        del others_wait
        self._mark_lost(session, _RELEASED)
        session.release_workers()
        print_note("the rank session has ended, and its GPUs are released for the users who wait")

    def _format_started(self, session: RankSession) -> str:
        return _format_started(len(session.devices), self._nodes(session))

    def _nodes(self, session: RankSession) -> str:
        return format_nodes(session.pool.group.workers(), session.pool.notebook_text)

    def _logs(self, session: RankSession) -> str:
        return run_folder.shorten_path(session.run.logs, self._validated.request.env.home)


@contextmanager
def count_interrupts() -> Iterator[Callable[[], int]]:
    """Count the interrupts in this block instead of raising them.

    Only the main thread gets interrupts: the count of any other thread stays 0.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: interrupts.append(number))
    try:
        yield lambda: len(interrupts)
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)


def print_note(text: str) -> None:
    """Print a line below the latest cell."""
    sys.stderr.write(f"gpu_launch: {text}\n")
    sys.stderr.flush()


def _format_started(ranks: int, nodes: str) -> str:
    """Format the message about started ranks."""
    verb = "runs" if ranks == 1 else "run"
    held = _format_held_gpus(ranks)
    return f"{format_count(ranks, 'rank')} {verb} on {nodes}, and {held} until %gpu_ranks --stop or the kernel's end"


def _format_state(ranks: int, nodes: str, *, age_s: float, idle_s: float | None, flags: str, logs: str) -> str:
    """Format the state for `%gpu_ranks` alone; `idle_s` is None while a cell runs."""
    now = "a cell runs" if idle_s is None else f"idle for {format_span(idle_s)}"
    started = f"Started with: %gpu_ranks {flags}".rstrip()
    return (
        f"{format_count(ranks, 'rank')} on {nodes} for {format_span(age_s)}, {now}. {started}\n"
        f"The GPUs are held until %gpu_ranks --stop or the kernel's end. Logs: {logs}\n"
    )


def _format_idle_warning(idle_s: float) -> str:
    """Format the warning before idle ranks end because others wait."""
    return (
        f"others wait for GPUs, and the rank session has run no cell for {format_span(idle_s)}: they end in "
        f"{format_span(NOTICE_S)}, with all their variables. Any %%gpu_ranks cell keeps them"
    )


def _format_held_gpus(ranks: int) -> str:
    return "holds its GPU" if ranks == 1 else "hold their GPUs"
