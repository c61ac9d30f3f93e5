"""`cp`."""

from __future__ import annotations

from pathlib import Path

import click

from gpu_launch.cli import copying, submit, unpacking
from gpu_launch.cli.commands_jobs import find_job
from gpu_launch.cli.completing import complete_run
from gpu_launch.cli.context import Context, json_option, pass_cli
from gpu_launch.cli.sending import format_size
from gpu_launch.cli.transfer import open_tar
from gpu_launch.errors import UsageError


@click.command()
@click.argument("source", metavar="SRC", shell_complete=complete_run)
@click.argument("target", metavar="DST", shell_complete=complete_run)
@json_option
@pass_cli
def cp(context: Context, source: str, target: str) -> None:
    """Copy a file or folder to the cluster or from it.

    One of SRC and DST is RUN:PATH, in the job's folder, or home:PATH, in your home on the cluster. A DST that ends with
    / is a folder to copy into; any other is the copy's own name. RUN:. is all that is in the folder. Ignore files do
    not count here.

    \b
    gpu-launch cp train:. results
    gpu-launch cp train:checkpoints results/
    gpu-launch cp data.bin home:datasets/
    """
    ends = copying.parse(source), copying.parse(target)
    match ends:
        case (copying.Remote() as remote, Path() as local):
            _download(context, remote, local, target)
        case (Path() as local, copying.Remote() as remote):
            _upload(context, local, remote)
        case _:
            what = "both" if isinstance(ends[0], copying.Remote) else "neither"
            raise UsageError(f"One of SRC and DST is on the cluster, RUN:PATH or home:PATH; here {what} is.")


def _root(context: Context, remote: copying.Remote) -> str:
    """Where its path begins, below the home."""
    if remote.where == copying.HOME:
        return ""
    return context.transfer.order(find_job(context, remote.where).run_id).folder


def _upload(context: Context, local: Path, remote: copying.Remote) -> None:
    into = remote.path.endswith("/") or remote.path in ("", ".")
    path = copying.below(_root(context, remote), remote.path)
    folder, load = copying.plan_upload(local, path, into=into)
    context.said.note(f"gpu-launch: {submit.load_text(load)} to ~/{folder}".rstrip("/"))
    submit.send_load(context, load, folder)
    context.said.result({"files": load.files, "bytes": load.size, "to": f"~/{path}"}, f"{local} → ~/{path}")


def _download(context: Context, remote: copying.Remote, local: Path, typed: str) -> None:
    path = copying.below(_root(context, remote), remote.path)
    is_content = remote.path in ("", ".") or remote.path.endswith("/.")
    into = not is_content and (local.is_dir() or typed.endswith(("/", "\\")))
    if into or is_content:
        local.mkdir(parents=True, exist_ok=True)
    elif not local.parent.is_dir():
        raise UsageError(f"There is no folder {local.parent}.")
    came = 0

    def count(size: int) -> None:
        nonlocal came
        came += size
        context.said.redraw(f"gpu-launch: {format_size(came)} came")

    with context.transfer.get(path) as answer, open_tar(answer, count) as tar:
        files, size = unpacking.unpack(tar, local, into=into)
    context.said.result(
        {"files": files, "bytes": size, "to": str(local)},
        f"{files} file{'' if files == 1 else 's'}, {format_size(size)} → {local}",
    )


COMMANDS: tuple[click.Command, ...] = (cp,)
