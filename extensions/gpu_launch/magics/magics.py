"""The IPython magics: each reads its line, calls the package that does the work, and shows the result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class

from gpu_launch import environment
from gpu_launch.common import exchange
from gpu_launch.errors import UsageError
from gpu_launch.launch import request
from gpu_launch.magics import completion, notebook
from gpu_launch.magics.cell_magics import GpuCellMagics, GpuRanksMagics
from gpu_launch.magics.debug import GpuDebugMagics
from gpu_launch.options import command
from gpu_launch.output import logs

if TYPE_CHECKING:
    from gpu_launch.detached.submit import Submitted
    from gpu_launch.options.launch_options import LaunchOptions


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
        text = None if cell is None else notebook.cell_text(self.shell, line, cell)
        if cell is not None and text is not None:
            notebook.check_syntax(cell, text)
        exchange_files = exchange.build_exchange(
            send=notebook.variables(options.send, self.shell.user_ns),
            returns=options.returns,
            cell=text,
            labels=notebook.labels(self.shell),
        )
        if options.dry_run:
            sys.stdout.write(_describe_dry_run(options, cell, exchange_files))
        elif options.detach:
            from gpu_launch.detached.submit import submit_from_notebook

            _print_submitted(submit_from_notebook(options, cell=cell, before=notebook.BEFORE, exchange=exchange_files))
        else:
            from gpu_launch.launch.notebook_launch import launch

            result = launch(options, cell=cell, before=notebook.BEFORE, exchange=exchange_files)
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
        from gpu_launch.launch.notebook_launch import launch

        launch(options, before=notebook.BEFORE)

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
                logs.parse_arguments(words),
                home=env.home,
                write=_write,
                will_restart=lambda run: own_jobs.has_job(env, run),
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


def _describe_dry_run(options: LaunchOptions, cell: str | None, exchange_files: exchange.ExchangeFiles | None) -> str:
    from gpu_launch.launch import dry_run

    if options.detach:
        from gpu_launch.detached.submit import build_dry_run

        return dry_run.format_report(build_dry_run(options, cell=cell, before=notebook.BEFORE, exchange=exchange_files))
    return dry_run.format_report(
        dry_run.build_report(options, cell=cell, before=notebook.BEFORE, exchange=exchange_files)
    )


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
