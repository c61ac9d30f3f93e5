"""The magics: parse, call, show."""

from __future__ import annotations

import difflib
import linecache
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython import get_ipython
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class

from gpu_launch import checks, completion, environment, exchange, flags, history, logs, options
from gpu_launch.errors import UsageError

if TYPE_CHECKING:
    from gpu_launch.detached.submit import Submitted

#: The environment when the extension was loaded: what differs later was set by the user, for the ranks too.
_BEFORE = dict(os.environ)


@magics_class
class GpuLaunchMagics(Magics):
    """The magics."""

    @line_cell_magic
    def gpu_launch(self, line: str, cell: str | None = None) -> None:
        """Run a script or this cell with torchrun over several nodes' GPUs."""
        wanted = options.parse(line, cell=cell is not None)
        if wanted.help:
            sys.stdout.write(flags.USAGE)
            return
        text = None if cell is None else cell_text(self.shell, line, cell)
        if cell is not None and text is not None:
            check_syntax(cell, text)
        given = exchange.build(
            send=variables(wanted.send, self.shell.user_ns),
            returns=wanted.returns,
            cell=text,
            labels=labels(self.shell),
        )
        if wanted.dry_run:
            from gpu_launch import dry_run

            sys.stdout.write(dry_run.text(dry_run.build(wanted, cell=cell, before=_BEFORE, exchange=given)))
        elif wanted.detach:
            from gpu_launch.detached.submit import submit_from_notebook

            _say_detached(submit_from_notebook(wanted, cell=cell, before=_BEFORE, exchange=given))
        else:
            from gpu_launch.launch import launch

            result = launch(wanted, cell=cell, before=_BEFORE, exchange=given)
            self.shell.user_ns.update(result.returned)

    @line_magic
    def gpu_status(self, line: str) -> None:
        """Show this notebook's standing workers, your jobs with their place in the queue, and the last runs."""
        _no_words("gpu_status", line)
        from gpu_launch import status

        status.show(environment.read())

    @line_magic
    def gpu_logs(self, line: str) -> None:
        """Show a run's output, see `logs.USAGE`."""
        words = shlex.split(line)
        if words in (["-h"], ["--help"]):
            sys.stdout.write(logs.USAGE)
            return
        from gpu_launch import jobs

        env = environment.read()
        try:
            logs.show(logs.parse(words), home=env.home, write=_write, goes_on=lambda run: jobs.goes_on(env, run))
        except KeyboardInterrupt:
            sys.stdout.write("\nstopped looking; the run goes on\n")

    @line_magic
    def gpu_cancel(self, line: str) -> None:
        """End a job of yours: `%gpu_cancel RUN`, or `%gpu_cancel all`. %gpu_status names them."""
        from gpu_launch import jobs

        sys.stdout.write(jobs.cancel(environment.read(), _one_word("gpu_cancel", line, needed=True)))

    @line_magic
    def gpu_release(self, line: str) -> None:
        """Free this notebook's standing workers: `%gpu_release`, or those of one run: `%gpu_release RUN`."""
        from gpu_launch import status

        sys.stdout.write(status.release(_one_word("gpu_release", line, needed=False)))


# `%gpu_launch?` shows these.
GpuLaunchMagics.gpu_launch.__doc__ = f"{GpuLaunchMagics.gpu_launch.__doc__}\n\n{flags.USAGE}"
GpuLaunchMagics.gpu_logs.__doc__ = f"Show a run's output.\n\n{logs.USAGE}"


def register(shell: Any) -> None:
    """Give `shell` the magics and their completion."""
    from gpu_launch.standing.magics import GpuRanksMagics

    shell.register_magics(GpuLaunchMagics, GpuRanksMagics)
    env = environment.read()
    completion.install(
        shell,
        completion.Sources(
            models=completion.Remembered(lambda: _models(env)).get,
            names=lambda: [name for name in shell.user_ns if name not in shell.user_ns_hidden],
            runs=lambda: [run.run_id for run in history.latest(env.home, most=50)],
            jobs=completion.Remembered(lambda: _jobs(env)).get,
            folder=Path.cwd,
        ),
    )


def labels(shell: Any) -> Callable[[str], str | None]:
    """How code's file name is called where it is a cell: `Cell In[7]`."""

    def label(filename: str) -> str | None:
        found = shell.compile.format_code_name(filename)
        return None if found is None else " ".join(found)

    return label


def labels_here() -> Callable[[str], str | None]:
    """The same for whatever runs this: a notebook, or a plain script, which has no cells."""
    shell = get_ipython()
    return (lambda filename: None) if shell is None else labels(shell)


def cell_text(shell: Any, line: str, cell: str) -> exchange.CellText:
    """The cell that is being run, as the notebook shows it."""
    inputs = shell.history_manager.input_hist_raw if shell.history_manager is not None else [""]
    # IPython counts on before a cell runs or after it, by its version: the place among the inputs is the number shown.
    shown, number, body = inputs[-1], len(inputs) - 1, cell.rstrip("\n")
    if not body or not shown.rstrip("\n").endswith(body):
        # Run by a program, without being kept.
        shown, number = f"%%gpu_launch {line}\n{cell}", shell.execution_count
    before = shown.rstrip("\n").removesuffix(body)
    return exchange.CellText(label=f"Cell In[{number}]", source=shown, skipped=before.count("\n"))


def check_syntax(cell: str, text: exchange.CellText) -> None:
    """Refuse a cell that is no Python before any GPU is asked for."""
    lines = text.source.splitlines(keepends=True)
    linecache.cache[text.label] = (len(text.source), None, lines, text.label)
    checks.check_syntax("\n" * text.skipped + cell, text.label, shown=text.label)


def variables(names: tuple[str, ...], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The notebook's variables of these names."""
    for name in exchange.missing(names, namespace):
        close = difflib.get_close_matches(name, [known for known in namespace if not known.startswith("_")], n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UsageError(f"--send {name}: the notebook has no variable {name}.{hint}")
    return {name: namespace[name] for name in names}


def _say_detached(job: Submitted) -> None:
    place = f", at position {job.position} in the queue" if job.position else ""
    waits = f", waits for {job.waiting_for.removeprefix('waits for ')}" if job.waiting_for else ""
    sys.stdout.write(
        f"{job.run_id} goes on without this notebook: {job.state}{place}{waits}.\n"
        f"%gpu_logs {job.run_id} -f shows its output, %gpu_status where it is, and %gpu_cancel {job.run_id} ends it.\n"
    )


def _write(stream: str, text: str) -> None:
    out = sys.stdout if stream == "stdout" else sys.stderr
    out.write(text)
    out.flush()


def _no_words(magic: str, line: str) -> None:
    if line.strip():
        raise UsageError(f"%{magic} takes no words, and {line.strip()} is one.")


def _one_word(magic: str, line: str, *, needed: bool) -> str:
    words = line.split()
    if len(words) > 1 or (needed and not words):
        raise UsageError(f"%{magic} {line.strip()}: the id of one run is needed. %gpu_status names them.")
    return words[0] if words else ""


def _models(env: environment.Environment) -> list[str]:
    from gpu_launch.jobs import broker_of

    broker = broker_of(env)
    return list(broker.cluster().models()) if broker is not None else []


def _jobs(env: environment.Environment) -> list[str]:
    from gpu_launch.jobs import broker_of, own_jobs

    broker = broker_of(env)
    return [job.run_id for job in own_jobs(broker, env)] if broker is not None else []
