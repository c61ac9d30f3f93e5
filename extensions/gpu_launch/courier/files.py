"""Files of a home: packs and unpacks them as tar, and reads the output and status of a detached job."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gpu_launch.common import untar
from gpu_launch.courier.protocol import CourierError, IncomingData

_BLOCK = 256 * 1024
_GZIP = b"\x1f\x8b"
#: Seconds between polls of a growing log.
_LOG_POLL_S = 0.25
#: Largest status of a job, bytes; its driver writes less.
MAX_STATUS = 256 * 1024


def resolve_path(home: Path, path: str) -> Path:
    """Return a path of the home.

    Raises:
        CourierError: The path leads out of the home, for example through a symbolic link.
    """
    resolved = home / path
    is_inside = not Path(path).is_absolute() and ".." not in Path(path).parts and "\0" not in path
    if not is_inside or not resolved.resolve().is_relative_to(home.resolve()):
        raise CourierError("invalid", f"{path}: this leads out of the home")
    return resolved


@contextlib.contextmanager
def explain_tar_errors(what: str) -> Iterator[None]:
    """Raise errors about a tar as what the user can understand; `what` begins the sentence.

    Raises:
        CourierError: The tar is broken.
    """
    try:
        yield
    except OSError as error:
        # An error of the file system has a number.
        if error.errno is not None:
            raise
        raise CourierError("invalid", f"{what} is not a complete tar archive: {error}") from None
    except (tarfile.TarError, EOFError) as error:
        raise CourierError("invalid", f"{what} is not a complete tar archive: {error}") from None


def unpack_into(home: Path, path: str, limit: int, incoming: IncomingData) -> dict[str, int]:
    """Unpack a tar, optionally compressed by gzip, below a folder of the home; return the numbers of files and bytes.

    A missing folder is created.

    Raises:
        CourierError: The tar has more than `limit` bytes, is broken, or has members that lead out of the folder or have
            a type that is not allowed.
    """
    folder = resolve_path(home, path)
    data = io.BufferedReader(incoming, _BLOCK)
    files = size = 0
    with (
        explain_tar_errors("the upload"),
        tarfile.open(fileobj=data, mode="r|gz" if data.peek(2)[:2] == _GZIP else "r|") as tar,
    ):
        _make_folder(home, folder)
        for member in tar:
            size += member.size if member.isreg() else 0
            files += 0 if member.isdir() else 1
            if size > limit:
                raise CourierError("too-large", f"the upload unpacks to more than the {limit} bytes that are allowed")
            _unpack(tar, member, folder.resolve())
    while data.read(_BLOCK):
        pass  # data after the end of the tar, up to the end frame
    return {"files": files, "bytes": size}


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    try:
        target = root.joinpath(*untar.parse_name(member.name))
        untar.unpack_member(tar, member, root, target, is_home=True)
    except untar.UnsafeMember as error:
        raise CourierError("invalid", str(error)) from None


def _make_folder(home: Path, folder: Path) -> None:
    missing = [
        folder_above
        for folder_above in (folder, *folder.parents)
        if folder_above != home and folder_above.is_relative_to(home)
    ]
    for folder_above in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder_above.mkdir(mode=0o700)
    if not folder.is_dir():
        raise CourierError("invalid", f"{folder.relative_to(home)} is a file, not a folder to unpack into")


def find_file(home: Path, path: str, limit: int) -> Path:
    """Return a file or folder of the home to fetch.

    Raises:
        CourierError: It is missing, or larger than `limit` bytes.
    """
    target = resolve_path(home, path)
    if not os.path.lexists(target):
        raise CourierError("not-found", f"there is no {path!r} in the home")
    size = 0
    for path_below in _walk(target):
        with contextlib.suppress(OSError):
            size += path_below.lstat().st_size
        if size > limit:
            raise CourierError("too-large", f"{path} has more than the {limit} bytes that are allowed in one download")
    return target


def _walk(root: Path) -> Iterator[Path]:
    """Yield a file or folder and all below it, a folder before what is in it."""
    yield root
    if root.is_dir() and not root.is_symlink():
        for folder, folders, names in os.walk(root, onerror=_raise_unless_gone):
            yield from (Path(folder, name) for name in sorted((*folders, *names)))


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def write_tar(source: Path, sink: BinaryIO) -> dict[str, int]:
    """Write a file or folder as a tar, beginning with its own name; skip devices, sockets and pipes.

    What a running job removes meanwhile, such as an older checkpoint, is left out.
    """
    sizes: list[int] = []
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_BLOCK) as tar:
        for path in _walk(source):
            with contextlib.suppress(FileNotFoundError):
                member = tar.gettarinfo(path, str(Path(source.name or ".", path.relative_to(source))))
                if member is None:
                    continue
                replace_hard_link(member, path)
                if member.isreg():
                    with path.open("rb") as file:
                        tar.addfile(member, file)
                elif member.isdir() or member.issym():
                    tar.addfile(member)
                if member.isreg() or member.issym():
                    sizes.append(member.size)
    return {"files": len(sizes), "bytes": sum(sizes)}


def replace_hard_link(member: tarfile.TarInfo, path: Path) -> None:
    """Make a further name of a file that the tar has already a file of its own: receivers take no hard links."""
    if member.islnk():
        member.type, member.linkname, member.size = tarfile.REGTYPE, "", path.stat().st_size


def resolve_run_folder(home: Path, run: str) -> Path:
    """Return the path of a run's folder."""
    return resolve_path(home, f".gpu_launch/jobs/{run}")


class GrowingLog:
    """Reads a file that may not exist yet. It is opened for each read, so that NFS shows new data."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset

    def copy_new(self, sink: BinaryIO) -> bool:
        """Write the new data; return whether there was any."""
        begin = self._offset
        try:
            with self.path.open("rb") as file:
                file.seek(begin)
                while data := file.read(_BLOCK):
                    sink.write(data)
                    self._offset += len(data)
        except FileNotFoundError:
            return False
        return self._offset > begin


class RunLogs:
    """All output of a run, or one rank's stdout and stderr of the latest start, from byte `offset` on.

    With `tail`, only the last `tail` bytes of what a run has written so far, and what follows.
    """

    def __init__(self, folder: Path, *, offset: int, rank: int | None, per_node: int, tail: int | None = None) -> None:
        if tail is not None:
            offset = max(offset, _read_size(folder / "output.log") - tail)
        self._folder, self._rank, self._per_node, self._skip = folder, rank, per_node, offset
        self._logs = {path: GrowingLog(path, offset) for path in ([folder / "output.log"] if rank is None else [])}

    def copy_new(self, sink: BinaryIO) -> bool:
        """Write the new data; return whether there was any."""
        if self._rank is not None:
            for path in find_rank_logs(self._folder, self._rank, self._per_node):
                if path not in self._logs:
                    self._logs[path] = GrowingLog(path, self._skip)
                    self._skip = max(0, self._skip - path.stat().st_size)
        copied = [log.copy_new(sink) for log in self._logs.values()]
        sink.flush()
        return any(copied)


def _read_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def find_rank_logs(folder: Path, rank: int, per_node: int) -> list[Path]:
    """Return the existing log files of a rank's latest start.

    They are `logs/node1/<start>/attempt_0/0/stdout.log` and `stderr.log`, below `node1-restart2` after the second
    restart.
    """
    node, local = divmod(rank, per_node)
    paths = [
        path
        for node_folder in (f"node{node}", f"node{node}-restart*")
        for path in folder.glob(f"logs/{node_folder}/*/attempt_*/{local}/std*.log")
    ]
    started = {path.parent: path.parent.stat().st_mtime_ns for path in paths}
    latest = max(started, key=lambda folder_path: started[folder_path], default=None)
    return sorted((path for path in paths if path.parent == latest), reverse=True)


def follow_logs(logs: RunLogs, sink: BinaryIO, is_over: threading.Event) -> None:
    """Write new data until `is_over` is set, then the rest."""
    while not is_over.wait(0 if logs.copy_new(sink) else _LOG_POLL_S):
        pass
    while logs.copy_new(sink):
        pass


def read_state(folder: Path) -> bytes:
    """Return the status of a detached job.

    Raises:
        CourierError: The job has not written it yet, or it is larger than `MAX_STATUS`.
    """
    try:
        with (folder / "state.json").open("rb") as file:
            state = file.read(MAX_STATUS + 1)
    except FileNotFoundError:
        raise CourierError("not-found", "the job has not written its status yet") from None
    if len(state) > MAX_STATUS:
        raise CourierError(
            "too-large", f"the job's status is larger than {MAX_STATUS} bytes: another program changed the file"
        )
    return state
