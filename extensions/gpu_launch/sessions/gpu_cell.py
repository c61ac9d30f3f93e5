"""The worker of `%%gpu`: takes a GPU for a cell, keeps it until others wait, and has the notebook's variables there."""

from __future__ import annotations

import importlib
import linecache
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from gpu_launch.broker.holdings import CELL
from gpu_launch.common.exchange import MAX_BYTES
from gpu_launch.common.variables import LARGE_BYTES, VariableTracker
from gpu_launch.errors import GpuLaunchError, LaunchFailed, LaunchInterrupted, UsageError
from gpu_launch.options import gpu_cell
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.output.text import format_count, format_size
from gpu_launch.sessions import cell_names
from gpu_launch.sessions.cell import CellRequest, CellRun, CellStep, format_failure
from gpu_launch.sessions.rank_main import ALONE
from gpu_launch.sessions.session import IdleAction, IdlePolicy, RankSession, SessionKind
from gpu_launch.sessions.session_manager import SessionManager, count_interrupts, print_note
from gpu_launch.units import format_memory, format_span

#: The cell runs on this rank; with several GPUs the others only hold theirs, which it sees as well.
_RANK = 0
_ASK_PERIOD_S = 2.0  # seconds between queries whether others wait for GPUs
_SHOWN_NAMES = 10
_AGAIN = "The next %%gpu cell takes a GPU again."


class CellIdlePolicy(IdlePolicy):
    """Gives an idle GPU back as soon as others wait, or after `keep_s`: the variables are in the notebook."""

    def should_ask(self, now: float) -> bool:
        if now - self._asked_at < _ASK_PERIOD_S:
            return False
        self._asked_at = now
        return True

    def decide(self, now: float, *, others_wait: bool) -> IdleAction:
        return IdleAction.END if others_wait or self.seconds_idle(now) >= self._keep_s else IdleAction.KEEP


class GpuCellManager(SessionManager):
    """The worker for the `%%gpu` cells of a notebook, one at a time. For the thread that runs cells."""

    kind = SessionKind(
        job_name=CELL, arguments=(ALONE,), shows_ranks=False, keeps_workers=False, build_policy=CellIdlePolicy
    )

    def __init__(
        self,
        options: LaunchOptions,
        *,
        before: Mapping[str, str],
        namespace: dict[str, Any],
        label: Callable[[str], str | None],
    ) -> None:
        """Prepare to take a GPU. `label` returns the label of a notebook's cell by the file name of its code.

        Raises:
            UsageError: The cluster has no such GPUs.
        """
        try:
            super().__init__(options, before=before)
        except UsageError as error:
            raise UsageError(str(error).replace("--nproc-per-node", "--gpus")) from None
        self._namespace, self._label = namespace, label
        self._tracker = VariableTracker(namespace, find_names=cell_names.find_function_names, rename=self._rename)
        #: The notebook's cells whose code was sent, by label.
        self._sources: dict[str, str] = {}
        #: Names of variables that only the worker has, with the reason.
        self.kept: dict[str, str] = {}
        #: Variables that only an earlier worker had: name → why they are gone.
        self._gone: dict[str, str] = {}
        self._is_watched = False
        #: Names of what was sent with the last cell.
        self._sent: tuple[str, ...] = ()

    def run_cell(self, cell: CellRequest) -> dict[str, list[object]]:
        """Run a cell on a GPU; its variables are in the namespace afterwards.

        Raises:
            UsageError: A variable that the cell uses is too large to be sent.
            LaunchFailed: The cell failed, or the worker was lost; the text says which.
            LaunchInterrupted: The user interrupted the cell.
        """
        if not self._is_watched:
            self._is_watched = True
            self._start_watch()
        return super().run_cell(cell)

    def describe(self) -> str:
        """Describe the worker for a person."""
        session = self._session
        if session is None or session.is_closed:
            return f"{self._loss}\n{_AGAIN}\n" if self._loss else gpu_cell.NO_WORKER
        idle_s = session.idle_policy.seconds_idle(time.monotonic())
        now = "a cell runs" if self._is_running else f"idle for {format_span(idle_s)}"
        flags = gpu_cell.format_flags(self.options)
        text = f"{self._nodes(session)}, taken {format_span(time.monotonic() - self._began_at)} ago, {now}."
        text += f" Taken with: %%gpu {flags}".rstrip() + f"\n{self._describe_end(session)}\n"
        return text + (f"Only there: {_format_reasons(self.kept)}\n" if self.kept else "")

    # -- before a cell --------------------------------------------------------------------------------------------

    def _prepare(self, cell: CellRequest) -> CellRequest:
        if not self.is_active:
            # A new worker has nothing.
            self._tracker.forget()
            self._gone |= {name: f"it was only on the worker that has ended ({why})" for name, why in self.kept.items()}
            self.kept = {}
        changes = self._tracker.find_changes(cell.variables["names"], limit=MAX_BYTES)
        if changes.too_large:
            self._tracker.forget()
            large = {name: changes.refused[name] for name in sorted(changes.too_large)}
            raise UsageError(
                f"{_format_reasons(large)}: too large to be sent to a GPU. Save it to a file in your home, and load it "
                "in the cell."
            )
        self._sent = (*changes.sizes, *changes.modules)
        for name in self._sent:
            self.kept.pop(name, None)
        # Else the cell would use the older values. What a cell has made there stays.
        removed = [name for name in self._tracker.list_withdrawn(changes.refused) if name not in self.kept]
        self._tracker.forget(removed)
        self._announce_large("sending", changes.sizes)
        # A cell may give a variable, without using it, the value that it had when it was sent last.
        unused = set(cell.variables["named"]).difference(cell.variables["names"])
        return replace(
            cell,
            ranks=(_RANK,),
            send=changes.data,
            sources=dict(self._sources),
            variables={
                **cell.variables,
                "modules": dict(changes.modules),
                "removed": removed,
                "outdated": self._tracker.list_outdated(unused),
                "unsent": {**self._gone, **changes.refused},
            },
        )

    def _rename(self, filename: str) -> str | None:
        label = self._label(filename)
        if label is not None:
            self._sources.setdefault(label, "".join(linecache.getlines(filename)))
        return label

    def _ensure_started(self) -> None:
        if self.is_active:
            return
        reason, self._loss = self._loss, ""
        self._screen.start_cell(at_once=True)
        if reason:
            self._write(f"{reason} A GPU is taken again.")
        self._start()

    def _format_started(self, session: RankSession) -> str:
        return f"the cell runs on {self._nodes(session)}. {self._describe_end(session)}"

    def _describe_end(self, session: RankSession) -> str:
        if session.pool.group.is_notebook_only:
            return "It is the notebook's own: there is nothing to release."
        idle = f"{format_span(session.keep_s)} idle" if session.keep_s else "the cell"
        return f"Released when others wait, after {idle}, or by %gpu --stop."

    # -- after a cell ---------------------------------------------------------------------------------------------

    def _receive_variables(self, session: RankSession, run: CellRun) -> None:
        lost = ""
        with count_interrupts() as interrupts:
            while run.variables is None and not lost:
                try:
                    run.poll(0)
                except GpuLaunchError as error:
                    lost = str(error)
                if interrupts() > 1:
                    lost = "The variables were not brought back."
            was_interrupted = interrupts() > 1
        if lost or run.variables is None:
            self._restart(session, run, lost, was_interrupted=was_interrupted)
            return
        header, frames = run.variables.header, run.variables.frames
        if not header["taken"]:
            self._tracker.forget(self._sent)
        problem = self._take(frames)
        unread = self._import_modules(header["modules"], header.get("submodules", ()))
        for name in header["deleted"]:
            self._namespace.pop(name, None)
            self.kept.pop(name, None)
        for name in (*header["sizes"], *header["modules"]):
            self.kept.pop(name, None)
            self._gone.pop(name, None)
        refused = {**header["refused"], **unread}
        if problem:
            refused |= dict.fromkeys(header["sizes"], problem)
        self._announce_large("brought back", header["sizes"])
        self._announce_kept(refused, large=header["too_large"])

    def _take(self, frames: Iterable[bytes]) -> str:
        """Put the worker's variables into the namespace; return why that is not possible, empty if it is."""
        try:
            for data in frames:
                self._tracker.apply(data, limit=MAX_BYTES)
        except Exception as error:  # noqa: BLE001 - unpickling runs code of others
            return f"it cannot be read here: {type(error).__name__}: {error}"
        return ""

    def _import_modules(self, modules: Mapping[str, str], submodules: Iterable[str]) -> dict[str, str]:
        """Import what the cell has imported; return why a module cannot be imported, by the variable's name."""
        problems: dict[str, str] = {}
        for name, module in modules.items():
            try:
                self._namespace[name] = importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - importing runs code of others
                problems[name] = f"{type(error).__name__}: {error}"
        self._tracker.note_modules({name: module for name, module in modules.items() if name not in problems})
        for module in submodules:
            # Not those of a function's own imports.
            if module.partition(".")[0] in self._namespace:
                try:
                    importlib.import_module(module)
                except Exception as error:  # noqa: BLE001 - importing runs code of others
                    problems[module] = f"{type(error).__name__}: {error}"
        return problems

    def _raise_end(self, session: RankSession, run: CellRun, step: CellStep, *, was_interrupted: bool) -> None:
        usable = "The worker and its variables are kept."
        if was_interrupted:
            raise LaunchInterrupted(f"the cell is stopped. {usable}")
        if step is CellStep.CHECK:
            (end,) = run.ends()
            text = end.error if not end.gpu else format_failure([end])
            raise LaunchFailed(f"{text}\n\nOn {self._nodes(session)}. {usable} Logs: {self._logs(session)}")

    def _restart(self, session: RankSession, run: CellRun, lost: str, *, was_interrupted: bool) -> None:
        """End a worker that was lost in a cell, and raise the reason: the next cell starts another."""
        ends = format_failure(run.ends()) if run.has_failures else ""
        reason = "\n".join(filter(None, [ends, lost, "" if "Logs: " in lost else f"Logs: {self._logs(session)}"]))
        # The next cell starts in the same worker, if that is still there.
        session.close("ended", is_final=False)
        self._loss = "The worker has ended."
        text = f"{reason}\nThe worker has ended.{self._describe_gone()} {_AGAIN}"
        if was_interrupted:
            raise LaunchInterrupted(f"the cell is stopped.\n{text}")
        raise LaunchFailed(text)

    def _release(self, session: RankSession, *, others_wait: bool) -> None:
        if session.pool.group.is_notebook_only:
            return
        nodes = self._nodes(session)
        if others_wait:
            why = "others wait for GPUs"
        else:
            why = f"no cell ran for {format_span(session.keep_s)}" if session.keep_s else "its cell had ended"
        gone = self._describe_gone()
        self._mark_lost(session, f"{nodes} was released, because {why}.{gone}")
        session.release_workers()
        # Without a time for which it is kept, the cell itself has said so, and this would stand in another's output.
        if others_wait or session.keep_s:
            print_note(f"{nodes} is released, because {why}.{gone} {_AGAIN}")

    # -- what is said ---------------------------------------------------------------------------------------------

    def _announce_large(self, what: str, sizes: Mapping[str, int]) -> None:
        if sum(sizes.values()) >= LARGE_BYTES:
            largest = sorted(sizes.items(), key=lambda item: -item[1])[:_SHOWN_NAMES]
            listed = ", ".join(f"{name} ({format_size(size)})" for name, size in largest if size >= LARGE_BYTES / 10)
            self._write(f"{what} {listed}")

    def _announce_kept(self, refused: Mapping[str, str], *, large: Collection[str]) -> None:
        """Name what stays on the worker, before it is lost there, and how to keep what is only too large."""
        new = {name: why for name, why in sorted(refused.items()) if self.kept.get(name) != why}
        self.kept |= new
        if not new:
            return
        stays, lost = ("stays", "is lost") if len(new) == 1 else ("stay", "are lost")
        text = f"{stays} on the worker, and {lost} when its GPU is released: {_format_reasons(new)}"
        if old := self._format_own(new):
            text += f". {old}"
        if names := ",".join(name for name in new if name in large):
            text += (
                f". To keep {names}: save to a file in your home in the next %%gpu cell, or up to "
                f"{format_memory(MAX_BYTES // 1024**2)}: %%gpu --return {names}"
            )
        self._write(text)

    def _describe_gone(self) -> str:
        if not self.kept:
            return ""
        old = self._format_own(self.kept)
        return f" Gone with it: {', '.join(self.kept)}." + (f" {old}." if old else "")

    def _format_own(self, names: Iterable[str]) -> str:
        """Format which of these the notebook has as well; empty for none."""
        own = [name for name in names if name in self._namespace]
        return f"The notebook has an older {', '.join(own)}" if own else ""

    def _write(self, text: str) -> None:
        self._screen.write("stdout", f"gpu_launch: {text}\n")
        self._screen.flush()


def _format_reasons(reasons: Mapping[str, str]) -> str:
    """Format as `loader (cannot be pickled: …), model (more than 256 MiB)`."""
    shown = [f"{name} ({why.removeprefix(f'{name} ')})" for name, why in list(reasons.items())[:_SHOWN_NAMES]]
    more = len(reasons) - len(shown)
    return ", ".join(shown) + (f" and {format_count(more, 'other')}" if more else "")
