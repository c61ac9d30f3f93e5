"""The command `cp`."""

from __future__ import annotations

import re
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import click

from gpu_launch.cli.connection.http import open_tar
from gpu_launch.cli.context import Context, json_option, pass_context
from gpu_launch.cli.job_lookup import complete_run
from gpu_launch.cli.jobs import find_job
from gpu_launch.cli.submission.upload import UploadSet, format_size, load_text, scan_path, send_load
from gpu_launch.common import untar
from gpu_launch.errors import GpuLaunchError, UsageError

HOME = "home"
_REMOTE = re.compile(r"([A-Za-z0-9][\w.-]+):(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class RemotePath:
    """A path on the cluster: `RUN:path` or `home:path`."""

    #: A run, named like on the command line, or `home`.
    root: str
    path: str


def parse_path(text: str) -> RemotePath | Path:
    """Parse SRC or DST. A single letter before a colon is a Windows drive; `./a:b` is always a local file."""
    match = _REMOTE.fullmatch(text)
    return Path(text) if match is None else RemotePath(root=match[1], path=match[2])


def resolve_remote_path(root: str, path: str) -> str:
    """Return `path` below `root` as a path below the home.

    Raises:
        UsageError: The path leads out of `root`.
    """
    plain = path.removeprefix("~/") if root == "" else path
    parts = PurePosixPath(plain).parts
    if plain.startswith("/"):
        raise UsageError(
            f"{path}: paths on the cluster begin in your home, or in the job's folder; leave out the first /."
        )
    if ".." in parts:
        raise UsageError(f"{path}: a path on the cluster cannot have .. in it.")
    return "/".join(part for part in (root, *parts) if part not in ("", "."))


def plan_upload(source: Path, target: str, *, into: bool) -> tuple[str, UploadSet]:
    """Return the remote folder and the files to unpack there.

    The result of the upload is `target`, or with `into` a file or folder in `target`.
    """
    if not source.exists():
        raise UsageError(f"There is no {source}.")
    # A link has its own name; `.` and `..` have none.
    own = source.resolve().name if source.name in ("", "..") else source.name
    name = own if into or not target else target.rpartition("/")[2]
    folder = target if into or not target else target.rpartition("/")[0]
    return folder, scan_path(source, name)


@click.command()
@click.argument("source", metavar="SRC", shell_complete=complete_run)
@click.argument("target", metavar="DST", shell_complete=complete_run)
@json_option
@pass_context
def cp(context: Context, source: str, target: str) -> None:
    """Copy a file or folder to the cluster or from it.

    One of SRC and DST is RUN:PATH, in the job's folder, or home:PATH, in your home on the cluster. A DST that ends with
    / is a folder to copy into; any other is the copy's own name. RUN:. is everything in the folder. Ignore files do
    not apply here.

    \b
    gpu-launch cp train:. results
    gpu-launch cp train:checkpoints results/
    gpu-launch cp data.bin home:datasets/
    """
    ends = parse_path(source), parse_path(target)
    match ends:
        case (RemotePath() as remote, Path() as local):
            _download(context, remote, local, target)
        case (Path() as local, RemotePath() as remote):
            _upload(context, local, remote)
        case _:
            what = "both" if isinstance(ends[0], RemotePath) else "neither"
            raise UsageError(f"One of SRC and DST must be on the cluster, RUN:PATH or home:PATH; here {what} is.")


def _find_root(context: Context, remote: RemotePath) -> str:
    """Return the folder, below the home, that the path is relative to."""
    if remote.root == HOME:
        return ""
    return context.transfer.read_manifest(find_job(context, remote.root).run_id).folder


def _upload(context: Context, local: Path, remote: RemotePath) -> None:
    into = remote.path.endswith("/") or remote.path in ("", ".")
    path = resolve_remote_path(_find_root(context, remote), remote.path)
    folder, upload = plan_upload(local, path, into=into)
    context.console.print_note(f"gpu-launch: {load_text(upload)} to ~/{folder}".rstrip("/"))
    send_load(context, upload, folder)
    context.console.print_result(
        {"files": upload.files, "bytes": upload.size, "to": f"~/{path}"}, f"{local} → ~/{path}"
    )


def _download(context: Context, remote: RemotePath, local: Path, typed: str) -> None:
    path = resolve_remote_path(_find_root(context, remote), remote.path)
    is_content = remote.path in ("", ".") or remote.path.endswith("/.")
    into = not is_content and (local.is_dir() or typed.endswith(("/", "\\")))
    if into or is_content:
        local.mkdir(parents=True, exist_ok=True)
    elif not local.parent.is_dir():
        raise UsageError(f"There is no folder {local.parent}.")
    received = 0

    def count(size: int) -> None:
        nonlocal received
        received += size
        context.console.draw_progress(f"gpu-launch: {format_size(received)} received")

    with context.transfer.get(path) as response, open_tar(response, count) as tar:
        files, size = unpack(tar, local, into=into)
    context.console.print_result(
        {"files": files, "bytes": size, "to": str(local)},
        f"{files} file{'' if files == 1 else 's'}, {format_size(size)} → {local}",
    )


def unpack(tar: tarfile.TarFile, target: Path, *, into: bool) -> tuple[int, int]:
    """Unpack a tar whose members' names begin with the requested name; return the number of files and bytes.

    Args:
        tar: The tar of one file or folder.
        target: The name of the copy, or the folder to copy into.
        into: `target` is a folder to copy into.

    Raises:
        GpuLaunchError: A member leads out of `target` or cannot be written.
    """
    files = size = 0
    try:
        for member in tar:
            parts = untar.parse_name(member.name)
            path = target.joinpath(*(parts if into else parts[1:]))
            untar.unpack_member(tar, member, target, path, is_home=False)
            files += not member.isdir()
            size += member.size if member.isreg() else 0
    except untar.UnsafeMember as error:
        raise GpuLaunchError(f"{error}; nothing more was copied.") from None
    except tarfile.TarError as error:
        raise GpuLaunchError(f"The copy is not complete, because the tar is broken: {error}.") from None
    except OSError as error:
        raise GpuLaunchError(f"{error.filename or target} cannot be written: {error.strerror or error}.") from None
    return files, size


COMMANDS: tuple[click.Command, ...] = (cp,)
