"""What is sent to the cluster: the files of a folder, which, how large and as which tar, and the manifests of a job."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self, cast

from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.cli.context import Context
from gpu_launch.cli.submission.ignore_rules import (
    IGNORE_FILES,
    IgnoreRules,
    is_ignored,
    read_rules,
    read_rules_above,
)
from gpu_launch.common import job_manifest
from gpu_launch.detached import job_files
from gpu_launch.errors import BrokerError, UsageError

#: Git's own data, and files that Python creates again.
NEVER_SENT = frozenset({".git", "__pycache__"})
#: More files are usually a mistake, such as uploading the home instead of a project.
MAX_FILES = 100_000
DEFAULT_MAX_BYTES = 512 * 1024**2
_MAX_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class UploadSet:
    """All files of one upload."""

    root: Path
    entries: tuple[UploadEntry, ...]
    #: Folders excluded without a rule, described for a person: virtual environments.
    excluded: tuple[str, ...] = ()

    @property
    def files(self) -> int:
        """Return the number of files and links."""
        return sum(not entry.is_folder for entry in self.entries)

    @property
    def size(self) -> int:
        """Return the total size in bytes before compression."""
        return sum(entry.size for entry in self.entries)

    def contains(self, name: str) -> bool:
        """Return whether this file is part of the upload."""
        return any(entry.name.as_posix() == name and not entry.is_folder for entry in self.entries)


@dataclass(frozen=True, kw_only=True)
class UploadEntry:
    """A file, folder or symbolic link."""

    path: Path
    #: Path relative to the uploaded folder.
    name: PurePosixPath
    size: int = 0
    #: Target of a symbolic link as it is sent; empty for other entries.
    link: str = ""
    is_folder: bool = False


def scan_project(root: Path) -> UploadSet:
    """Return the files of a project's folder that are not ignored.

    Raises:
        UsageError: A link leads out of the folder, there are too many files, or the folder is not a project.
    """
    root = root.resolve()
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder.")
    if root == Path.home().resolve() or root.parent == root:
        raise UsageError(
            f"{root} is {'the root of all files' if root.parent == root else 'your whole home'}: change to the "
            "project's folder, or name it with --workdir. --no-workdir uploads nothing."
        )
    entries: list[UploadEntry] = []
    left_out: list[str] = []
    for entry in _walk(root, root, read_rules_above(root), left_out):
        entries.append(entry)
        if len(entries) > MAX_FILES:
            raise UsageError(
                f"{root} has more than {MAX_FILES} files. Leave some out with a {IGNORE_FILES[1]} file, "
                "written like .gitignore, or name another folder with --workdir."
            )
    return UploadSet(root=root, entries=tuple(entries), excluded=tuple(left_out))


def scan_path(source: Path, name: str) -> UploadSet:
    """Return a file or folder as `name`, with all its files, ignored or not.

    Raises:
        UsageError: A link leads out of the folder.
    """
    source = source.resolve()
    top = PurePosixPath(name)
    if not source.is_dir():
        return UploadSet(root=source.parent, entries=(UploadEntry(path=source, name=top, size=source.stat().st_size),))
    entries = [UploadEntry(path=source, name=top, is_folder=True)]
    for folder, folders, files in os.walk(source):
        for child in sorted([*folders, *files]):
            path = Path(folder, child)
            entry_name = top / path.relative_to(source).as_posix()
            if path.is_symlink():
                entries.append(UploadEntry(path=path, name=entry_name, link=_relative_link(path, source)))
            elif path.is_dir():
                entries.append(UploadEntry(path=path, name=entry_name, is_folder=True))
            elif path.is_file():
                entries.append(UploadEntry(path=path, name=entry_name, size=path.stat().st_size))
    return UploadSet(root=source, entries=tuple(entries))


def _walk(folder: Path, root: Path, above: tuple[IgnoreRules, ...], left_out: list[str]) -> Iterator[UploadEntry]:
    own_rules = read_rules(folder)
    levels = above if own_rules is None else (*above, own_rules)
    try:
        children = sorted(os.scandir(folder), key=lambda child: child.name)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}.") from None
    for child in children:
        path = Path(child.path)
        is_folder = child.is_dir(follow_symlinks=False)
        if child.name in NEVER_SENT or is_ignored(path, levels, is_folder=is_folder):
            continue
        name = PurePosixPath(path.relative_to(root).as_posix())
        if child.is_symlink():
            yield UploadEntry(path=path, name=name, link=_relative_link(path, root))
        elif is_folder:
            if (path / "pyvenv.cfg").is_file():
                left_out.append(f"{name} (a virtual environment)")
                continue
            yield UploadEntry(path=path, name=name, is_folder=True)
            yield from _walk(path, root, levels, left_out)
        elif child.is_file():
            yield UploadEntry(path=path, name=name, size=child.stat().st_size)


def _relative_link(path: Path, root: Path) -> str:
    """Return a link's target relative to the link's folder.

    Raises:
        UsageError: The target is not part of the upload.
    """
    # realpath also works for a target that does not exist.
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(root):
        raise UsageError(
            f"{path.relative_to(root).as_posix()} is a link to {path.readlink()}, outside of the uploaded folder. "
            f"List it in {IGNORE_FILES[1]}, or put the file itself there."
        )
    return Path(os.path.relpath(target, path.parent)).as_posix()


def check_size(upload: UploadSet, *, limit: int) -> None:
    """Check the size of an upload.

    Raises:
        UsageError: It is larger than `limit` bytes; the text names the largest files.
    """
    if upload.size <= limit:
        return
    largest = sorted(upload.entries, key=lambda entry: -entry.size)[:_MAX_NAMED]
    names = ", ".join(f"{entry.name} ({format_size(entry.size)})" for entry in largest)
    raise UsageError(
        f"{upload.root} has {format_size(upload.size)} to upload, more than {format_size(limit)}. "
        f"The largest: {names}. List files that are not needed in {IGNORE_FILES[1]}, written like .gitignore; copy "
        "data once with `gpu-launch cp`; or allow more with --max-size."
    )


def write_tar(tar: tarfile.TarFile, load: UploadSet, *, on_bytes: Callable[[int], None] = lambda size: None) -> None:
    """Write all files into a tar.

    Raises:
        UsageError: A file disappeared or became shorter.
    """
    for entry in load.entries:
        write_entry(tar, entry, on_bytes=on_bytes)


def write_entry(
    tar: tarfile.TarFile, entry: UploadEntry, *, on_bytes: Callable[[int], None] = lambda size: None
) -> None:
    """Write one entry without its owner: the receiving user becomes the owner."""
    info = tarfile.TarInfo(entry.name.as_posix())
    try:
        status = entry.path.lstat()
    except OSError:
        raise UsageError(f"{entry.path} disappeared during the upload. Run the command again.") from None
    info.mtime = int(status.st_mtime)
    if entry.is_folder:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(info)
    elif entry.link:
        info.type, info.linkname = tarfile.SYMTYPE, entry.link
        tar.addfile(info)
    else:
        info.size, info.mode = entry.size, 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        with _SizedFile(entry, on_bytes) as content:
            tar.addfile(info, cast("Any", content))


class _SizedFile:
    """A file read with the size recorded earlier.

    Its errors are UsageErrors, to differ from those of the connection.
    """

    def __init__(self, entry: UploadEntry, on_bytes: Callable[[int], None]) -> None:
        self._path, self._left, self._on_bytes = entry.path, entry.size, on_bytes
        try:
            self._opened = entry.path.open("rb")
        except OSError as error:
            raise UsageError(f"{entry.path} cannot be read: {error.strerror}.") from None

    def read(self, size: int) -> bytes:
        """Return `size` bytes, fewer at the end."""
        expected = min(size, self._left)
        try:
            data = self._opened.read(expected)
        except OSError as error:
            raise UsageError(f"{self._path} cannot be read: {error.strerror}.") from None
        if len(data) < expected:
            raise UsageError(f"{self._path} became shorter during the upload. Run the command again.")
        self._left -= len(data)
        self._on_bytes(len(data))
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def write_texts(tar: tarfile.TarFile, texts: Mapping[str, bytes]) -> None:
    """Write small files that only their owner may read."""
    for name, data in texts.items():
        info = tarfile.TarInfo(name)
        info.size, info.mode, info.mtime = len(data), 0o600, int(time.time())
        tar.addfile(info, io.BytesIO(data))


def format_size(size: int) -> str:
    """Format as `812 B`, `4.0 KiB`, `1.2 GiB`."""
    if size < 1024:
        return f"{size} B"
    power = min(3, (size.bit_length() - 1) // 10)
    return f"{size / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


@dataclass(frozen=True, kw_only=True)
class JobSubmission:
    """A job that is checked and not yet requested."""

    manifest: job_manifest.JobManifest
    nnodes: int
    least_nnodes: int | None
    nproc_per_node: int
    demand: GpuRequest
    profile: str | None = None
    image: str | None = None
    #: None where nothing of this machine is sent.
    load: UploadSet | None = None
    #: Indexes of an array's tasks; None for a single job.
    indexes: tuple[int, ...] | None = None
    #: Number of tasks that may run at the same time; None for all.
    max_running: int | None = None
    #: The run, or array, that must succeed before; None for none.
    after: str | None = None
    #: It runs next to the other jobs of its task file, instead of after the one before.
    is_parallel: bool = False
    #: In a job group: seconds that it runs on when the jobs without this value have ended; None for such a job.
    auxiliary_s: int | None = None
    #: Number of times that it runs again after a failure.
    retries: int = 0
    #: It starts again at the next request to its port, after it has ended by itself and well.
    sleeps: bool = False
    #: Port of its server, and who reaches it besides the owner.
    port: int | None = None
    port_users: tuple[str, ...] = ()


def send_job(context: Context, job: JobSubmission, run_id: str) -> None:
    """Send the working directory and the manifests to the home on the cluster.

    Raises:
        BrokerError: when they cannot be sent.
    """
    load, folder = job.load, job.manifest.folder
    try:
        if load is not None:
            context.console.print_note(f"gpu-launch: {load_text(load)} to ~/{folder}")
            send_load(context, load, folder)
        elif folder:
            context.transfer.put(folder, lambda tar: None)
        _send_manifests(context, job, run_id)
    except BrokerError as error:
        text = f"The files could not be sent: {error}"
        raise BrokerError(text, status=error.status, help_url=error.help_url) from None


def _send_manifests(context: Context, job: JobSubmission, run_id: str) -> None:
    """Send each job's files to its run folder, all in one request."""
    jobs_path = ".gpu_launch/jobs"
    if job.indexes is None:
        files = job_files.build_files(job.manifest)
        context.transfer.put(f"{jobs_path}/{run_id}", lambda tar: write_texts(tar, files))
        return
    manifests = job_files.split_manifest(job.manifest, run_id, job.indexes)
    files = {
        f"{task_run}/{name}": data
        for task_run, manifest in manifests.items()
        for name, data in job_files.build_files(manifest).items()
    }
    context.transfer.put(jobs_path, lambda tar: write_texts(tar, files))


def send_load(context: Context, load: UploadSet, path: str) -> None:
    """Send the files of a folder, with a line of progress on a terminal."""
    sent = 0

    def count(size: int) -> None:
        nonlocal sent
        sent += size
        part = f"{100 * sent // load.size} %" if load.size else "100 %"
        context.console.draw_progress(f"gpu-launch: {part} of {format_size(load.size)} sent")

    def write(tar: Any) -> None:
        nonlocal sent
        sent = 0
        write_tar(tar, load, on_bytes=count)

    context.transfer.put(path, write)
    context.console.clear_progress()


def load_text(load: UploadSet) -> str:
    """Return `sending 12 files, 3.4 MiB`."""
    files = "1 file" if load.files == 1 else f"{load.files} files"
    without = f", without {', '.join(load.excluded)}" if load.excluded else ""
    return f"sending {files}, {format_size(load.size)}{without}"
