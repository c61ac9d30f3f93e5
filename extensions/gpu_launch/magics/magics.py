"""The IPython magics: each reads its line, calls the package that does the work, and shows the result."""

from __future__ import annotations

import atexit
import difflib
import json
import linecache
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython import get_ipython
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class

from gpu_launch import environment
from gpu_launch.common import exchange
from gpu_launch.errors import UsageError
from gpu_launch.launch import request
from gpu_launch.magics import completion
from gpu_launch.magics.debug import GpuDebugMagics
from gpu_launch.options import command, gpu_cell, rank_session
from gpu_launch.options.gpu_cell import GpuCellOptions
from gpu_launch.options.rank_session import RankSessionOptions
from gpu_launch.output import logs

if TYPE_CHECKING:
    from gpu_launch.detached.submit import Submitted
    from gpu_launch.options.definition import LaunchOptions
    from gpu_launch.sessions.cell import CellRequest
    from gpu_launch.sessions.gpu_cell import GpuCellManager
    from gpu_launch.sessions.session_manager import SessionManager


#: The environment when the extension was loaded: the user has set what differs later, for the ranks too.
_BEFORE = dict(os.environ)


@magics_class
class GpuRanksMagics(Magics):
    """`%gpu_ranks` and `%%gpu_ranks`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._group: SessionManager | None = None
        atexit.register(self._abandon)

    @property
    def session(self) -> SessionManager | None:
        """The ranks that wait for cells; None without any."""
        return self._group

    @line_cell_magic
    def gpu_ranks(self, line: str, cell: str | None = None) -> None:
        """Run this cell on every rank of a process group that stays from cell to cell."""
        asked = rank_session.parse(line, cell=cell is not None)
        if asked.help:
            sys.stdout.write(rank_session.USAGE)
        elif asked.stop:
            self._stop()
        elif cell is not None:
            built = self._cell(asked, line, cell)
            self.shell.user_ns.update(self._ensure(asked).run_cell(built))
        elif asked.has_start_flags or asked.restart:
            self._ensure(asked)
        else:
            sys.stdout.write(rank_session.NO_SESSION if self._group is None else self._group.describe())

    def _ensure(self, asked: RankSessionOptions) -> SessionManager:
        """Return the running ranks, after starting them where there are none or others are requested."""
        from gpu_launch.sessions.session_manager import SessionManager

        group = self._group
        if group is not None and not asked.restart:
            if group.is_active:
                rank_session.check_same(group.options, asked)
            if group.is_active or not asked.has_start_flags:
                return group
        options = group.options if group is not None and not asked.has_start_flags else asked.start
        # A refusal must come before the running ranks are ended.
        new = SessionManager(options, before=_BEFORE)
        self._end()
        new.start()
        self._group = new
        return new

    def _cell(self, asked: RankSessionOptions, line: str, cell: str) -> CellRequest:
        """Return the checked request, before any rank is involved."""
        from gpu_launch.sessions.cell import CellRequest

        text = cell_text(self.shell, line, cell)
        check_syntax(cell, text)
        exchange_files = exchange.build_exchange(
            send=variables(asked.options.send, self.shell.user_ns), labels=labels(self.shell)
        )
        files = {} if exchange_files is None else exchange_files.files
        sources = json.loads(files[exchange.SOURCES])["sources"] if exchange.SOURCES in files else {}
        return CellRequest(
            source=text,
            body=cell,
            ranks=asked.ranks,
            send=files.get(exchange.SEND),
            sources=sources,
            returns=asked.options.returns,
        )

    def _stop(self) -> None:
        nodes = self._end()
        sys.stdout.write(f"gpu_launch: the ranks on {nodes} have ended\n" if nodes else rank_session.NO_SESSION)

    def _end(self) -> str:
        group, self._group = self._group, None
        return "" if group is None else group.stop()

    def _abandon(self) -> None:
        if self._group is not None:
            self._group.abandon()


@magics_class
class GpuCellMagics(Magics):
    """`%gpu` and `%%gpu`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._worker: GpuCellManager | None = None
        atexit.register(self._abandon)

    @line_cell_magic
    def gpu(self, line: str, cell: str | None = None) -> None:
        """Run this cell on a GPU that is taken for it, with the notebook's variables."""
        asked = gpu_cell.parse(line, cell=cell is not None)
        if asked.help:
            sys.stdout.write(gpu_cell.USAGE)
        elif asked.stop:
            nodes = self._end()
            sys.stdout.write(f"gpu_launch: {nodes} is given back\n" if nodes else gpu_cell.NO_WORKER)
        elif cell is None:
            sys.stdout.write(gpu_cell.NO_WORKER if self._worker is None else self._worker.describe())
        else:
            # The checks come before a GPU is taken.
            request = self._build_request(asked, line, cell)
            self._choose_worker(asked).run_cell(request)

    def _build_request(self, asked: GpuCellOptions, line: str, cell: str) -> CellRequest:
        from gpu_launch.sessions import cell_names
        from gpu_launch.sessions.cell import CellRequest

        text = cell_text(self.shell, line, cell)
        check_syntax(cell, text)
        namespace, hidden = self.shell.user_ns, self.shell.user_ns_hidden
        sent = variables(asked.options.send, namespace)
        used = cell_names.find_used_names(cell).union(sent)
        return CellRequest(
            source=text,
            body=cell,
            variables={
                "names": sorted(cell_names.find_all_names(cell_names.select_variables(used, hidden), namespace)),
                "named": sorted(cell_names.select_variables(used | cell_names.find_bound_names(cell), hidden)),
                "wanted": list(asked.options.returns),
            },
        )

    def _choose_worker(self, asked: GpuCellOptions) -> GpuCellManager:
        """Return the worker that is there; with other options a new one, after giving that back."""
        from gpu_launch.sessions.gpu_cell import GpuCellManager

        worker = self._worker
        if worker is not None and asked.fits(worker.options):
            return worker
        if worker is not None and worker.is_active and worker.kept:
            raise UsageError(
                f"The GPU that is there does not fit these flags, and {', '.join(worker.kept)} would be gone with it. "
                "Leave the flags out to use it, or give it back with %gpu --stop."
            )
        # A refusal must come before the worker is ended.
        new = GpuCellManager(asked.start, before=_BEFORE, namespace=self.shell.user_ns, label=labels(self.shell))
        self._end()
        self._worker = new
        return new

    def _end(self) -> str:
        worker, self._worker = self._worker, None
        return "" if worker is None else worker.stop()

    def _abandon(self) -> None:
        if self._worker is not None:
            self._worker.abandon()


# `%gpu?` and `%gpu_ranks?` show these.
GpuCellMagics.gpu.__doc__ = f"{GpuCellMagics.gpu.__doc__}\n\n{gpu_cell.USAGE}"
GpuRanksMagics.gpu_ranks.__doc__ = f"{GpuRanksMagics.gpu_ranks.__doc__}\n\n{rank_session.USAGE}"


@magics_class
class GpuLaunchMagics(Magics):
    """The magics for launches, their output and their workers."""

    @line_cell_magic
    def gpu_launch(self, line: str, cell: str | None = None) -> None:
        """Run a script or this cell with torchrun over several nodes' GPUs."""
        options = command.parse(line, cell=cell is not None)
        if options.help:
            sys.stdout.write(command.USAGE)
            return
        text = None if cell is None else cell_text(self.shell, line, cell)
        if cell is not None and text is not None:
            check_syntax(cell, text)
        exchange_files = exchange.build_exchange(
            send=variables(options.send, self.shell.user_ns),
            returns=options.returns,
            cell=text,
            labels=labels(self.shell),
        )
        if options.dry_run:
            sys.stdout.write(_describe_dry_run(options, cell, exchange_files))
        elif options.detach:
            from gpu_launch.detached.submit import submit_from_notebook

            _print_submitted(submit_from_notebook(options, cell=cell, before=_BEFORE, exchange=exchange_files))
        else:
            from gpu_launch.launch.launch import launch

            result = launch(options, cell=cell, before=_BEFORE, exchange=exchange_files)
            self.shell.user_ns.update(result.returned)
            if options.predict:
                _show_chart(options, cell)

    @line_magic
    def gpu_bench(self, line: str) -> None:
        """Measure GPUs and the network between them, for `%gpu_launch --predict`."""
        options = command.parse_bench(line)
        if options.help:
            sys.stdout.write(command.BENCH_USAGE)
            return
        from gpu_launch.launch.launch import launch

        launch(options, before=_BEFORE)

    @line_magic
    def gpu_status(self, line: str) -> None:
        """Show this notebook's workers, your jobs with their place in the queue, and the last runs."""
        _check_empty("gpu_status", line)
        from gpu_launch.magics import status

        status.show(environment.read())

    @line_magic
    def gpu_logs(self, line: str) -> None:
        """Show a run's output, see `logs.USAGE`."""
        words = command.split_line(line)
        if words in (["-h"], ["--help"]):
            sys.stdout.write(logs.USAGE)
            return
        from gpu_launch.broker import own_jobs

        env = environment.read()
        try:
            logs.show_logs(
                logs.parse_arguments(words), home=env.home, write=_write, goes_on=lambda run: own_jobs.has_job(env, run)
            )
        except KeyboardInterrupt:
            sys.stdout.write("\nstopped following; the run continues\n")

    @line_magic
    def gpu_stacks(self, line: str) -> None:
        """Show where all ranks of a run are: `%gpu_stacks [RUN] [--full]`, with `--full` all threads of every rank.

        The notebook that runs the cell itself is busy: ask in another one, or with `gpu-launch stacks RUN`.
        """
        from gpu_launch.output import stack_request

        words = command.split_line(line)
        text = _read_run_id("gpu_stacks", " ".join(word for word in words if word != "--full"), needed=False)
        run = logs.find_active_run(environment.read().home, text)
        sys.stdout.write(stack_request.ask(run)["full" if "--full" in words else "text"])

    @line_magic
    def gpu_cancel(self, line: str) -> None:
        """End a job of yours: `%gpu_cancel RUN`, or `%gpu_cancel all`. %gpu_status names them."""
        from gpu_launch.broker import own_jobs

        sys.stdout.write(own_jobs.cancel_jobs(environment.read(), _read_run_id("gpu_cancel", line, needed=True)))

    @line_magic
    def gpu_release(self, line: str) -> None:
        """Free this notebook's idle workers: `%gpu_release`, or those of one run: `%gpu_release RUN`."""
        from gpu_launch.magics import status

        sys.stdout.write(status.release_pools(_read_run_id("gpu_release", line, needed=False)))


# `%gpu_launch?` shows these.
GpuLaunchMagics.gpu_launch.__doc__ = f"{GpuLaunchMagics.gpu_launch.__doc__}\n\n{command.USAGE}"
GpuLaunchMagics.gpu_bench.__doc__ = f"{GpuLaunchMagics.gpu_bench.__doc__}\n\n{command.BENCH_USAGE}"
GpuLaunchMagics.gpu_logs.__doc__ = f"Show a run's output.\n\n{logs.USAGE}"


def register(shell: Any) -> None:
    """Give `shell` the magics and their completion."""
    ranks = GpuRanksMagics(shell)
    shell.register_magics(GpuLaunchMagics, ranks, GpuCellMagics, GpuDebugMagics(shell, lambda: ranks.session))
    env = environment.read()
    completion.install(
        shell,
        completion.CompletionSources(
            models=completion.CachedCall(lambda: _models(env)).get,
            names=lambda: [name for name in shell.user_ns if name not in shell.user_ns_hidden],
            runs=lambda: [run.run_id for run in logs.list_runs(env.home, most=50)],
            jobs=completion.CachedCall(lambda: _jobs(env)).get,
            folder=Path.cwd,
        ),
    )


def labels(shell: Any) -> Callable[[str], str | None]:
    """Return what names a cell by its code's file name, such as `Cell In[7]`; None for other code."""

    def label(filename: str) -> str | None:
        found = shell.compile.format_code_name(filename)
        return None if found is None else " ".join(found)

    return label


def labels_here() -> Callable[[str], str | None]:
    """Return the same for this process: a notebook, or a plain script, which has no cells."""
    shell = get_ipython()
    return (lambda filename: None) if shell is None else labels(shell)


def cell_text(shell: Any, line: str, cell: str) -> exchange.CellSource:
    """Return the running cell as the notebook shows it."""
    inputs = shell.history_manager.input_hist_raw if shell.history_manager is not None else [""]
    # Versions of IPython count up before a cell runs or after it: the place among the inputs is the number shown.
    shown, number, body = inputs[-1], len(inputs) - 1, cell.rstrip("\n")
    if not body or not shown.rstrip("\n").endswith(body):
        # A program ran it, without adding it to the inputs.
        shown, number = f"%%gpu_launch {line}\n{cell}", shell.execution_count
    before = shown.rstrip("\n").removesuffix(body)
    return exchange.CellSource(label=f"Cell In[{number}]", source=shown, skipped=before.count("\n"))


def check_syntax(cell: str, text: exchange.CellSource) -> None:
    """Refuse a cell that is not Python before any GPU is requested."""
    lines = text.source.splitlines(keepends=True)
    linecache.cache[text.label] = (len(text.source), None, lines, text.label)
    request.check_syntax("\n" * text.skipped + cell, text.label, shown=text.label)


def variables(names: tuple[str, ...], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notebook's variables of these names.

    Raises:
        UsageError: for a name that the notebook does not have, with one that is close.
    """
    for name in exchange.find_missing(names, namespace):
        close = difflib.get_close_matches(name, [other for other in namespace if not other.startswith("_")], n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UsageError(f"--send {name}: the notebook has no variable {name}.{hint}")
    return {name: namespace[name] for name in names}


def _describe_dry_run(options: LaunchOptions, cell: str | None, exchange_files: exchange.ExchangeFiles | None) -> str:
    from gpu_launch.launch import dry_run

    if options.detach:
        from gpu_launch.detached.submit import build_dry_run

        return dry_run.format_report(build_dry_run(options, cell=cell, before=_BEFORE, exchange=exchange_files))
    return dry_run.format_report(dry_run.build_report(options, cell=cell, before=_BEFORE, exchange=exchange_files))


def _show_chart(options: LaunchOptions, cell: str | None) -> None:
    """Show the chart of a prediction, if there is one."""
    from IPython.display import Image, display

    from gpu_launch.prediction import figures

    key = request.build_prediction_key(options, cell=cell, cwd=Path.cwd())
    chart = figures.get_prediction_path(environment.read().home, key).with_suffix(".png")
    if chart.is_file():
        display(Image(filename=str(chart)))


def _print_submitted(job: Submitted) -> None:
    from gpu_launch.broker.holdings import format_holdings

    place = f", at position {job.position} in the queue" if job.position else ""
    waits = f", waits for {job.waiting_for.removeprefix('waits for ')}" if job.waiting_for else ""
    if job.tasks:
        sys.stdout.write(
            f"{job.run_id} runs without this notebook: {len(job.tasks)} tasks, {job.tasks[0]} to {job.tasks[-1]}"
            f"{waits}.\n%gpu_logs {job.tasks[0]} -f shows one's output, %gpu_status all states, and "
            f"%gpu_cancel {job.run_id} ends all of them.\n"
        )
        return
    sys.stdout.write(
        f"{job.run_id} runs without this notebook: {job.state}{place}{waits}.\n"
        f"%gpu_logs {job.run_id} -f shows its output, %gpu_status its state, and %gpu_cancel {job.run_id} ends it.\n"
    )
    for text in format_holdings(job.holdings, cancel="%gpu_cancel"):
        sys.stdout.write(f"{text}\n")


def _write(stream: str, text: str) -> None:
    out = sys.stdout if stream == "stdout" else sys.stderr
    out.write(text)
    out.flush()


def _check_empty(magic: str, line: str) -> None:
    if line.strip():
        raise UsageError(f"%{magic} takes no arguments, and {line.strip()} is one.")


def _read_run_id(magic: str, line: str, *, needed: bool) -> str:
    words = line.split()
    if len(words) > 1 or (needed and not words):
        raise UsageError(f"%{magic} {line.strip()}: the id of one run is needed. %gpu_status names them.")
    return words[0] if words else ""


def _models(env: environment.Environment) -> list[str]:
    from gpu_launch.broker.client import build_broker

    broker = build_broker(env)
    return list(broker.get_cluster().list_models()) if broker is not None else []


def _jobs(env: environment.Environment) -> list[str]:
    from gpu_launch.broker.client import build_broker
    from gpu_launch.broker.own_jobs import list_own_jobs

    broker = build_broker(env)
    return [job.run_id for job in list_own_jobs(broker, env)] if broker is not None else []
