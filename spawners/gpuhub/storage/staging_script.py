"""Lists a dataset, or copies it to this node's disk and on to the next node; prints lines of JSON.

The caller passes this file's text to `python3 -c` in a container, so it imports nothing of gpuhub. The one argument is
a task as JSON. The process runs as a user with no rights of its own, so it reads what every user may read. The variable
`GPUHUB_STAGING_SECRET` has the secret of a transfer.

- `{"do": "list", "folder": "/datasets/digits"}` prints `{"digest": "9f3c…", "files": 2, "bytes": 1797}`. The digest is
  of names, kinds, modes, sizes, modification times and targets of links, not of contents.
- `{"do": "copy", "digest": "9f3c…", "bytes": 1797, "read": "/datasets/digits" | null, "write": "/copy" | null,
  "next": "host" | null, "spare": 1024}` copies the folder `read`, or what the previous node sends if that is null, to
  the folder `write`, where `spare` bytes remain free, and to the next node. It prints `{"copied": 1024}` from time to
  time, and at the end `{"done": true, "next_error": null}`.

A failed task prints `{"error": "…"}` and ends with exit code 1.

A stream has the secret, then a frame for each entry: its length, its description as JSON and, for a file, its content
and the SHA-256 of it. An empty frame ends the stream. A folder comes before what is in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import json
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

#: TCP port on the network that only these containers share.
PORT = 7433
_CHUNK = 1 << 20
#: Maximum wait for the next or the previous node to connect, seconds.
_CONNECT_S = 120.0
#: Maximum wait for bytes of a running stream, seconds.
_SILENCE_S = 300.0
_RETRY_S = 0.1
_REPORT_S = 1.0
#: A description of an entry is a path and a few numbers.
_MAX_HEADER = 1 << 16
_HASH_BYTES = 32
_OTHERS_READ, _OTHERS_ENTER = stat.S_IROTH, stat.S_IROTH | stat.S_IXOTH

#: Path below the dataset's folder (the folder's own is empty), kind (`folder`, `file` or `link`), mode, size, time of
#: the last change in nanoseconds (0 for folders below the first) and, for a link, its target.
Entry = dict[str, Any]


class StagingError(Exception):
    """Why the dataset cannot be listed or copied; the text is for its user."""


# -- the folder -------------------------------------------------------------------------------------------------------


def list_entries(root: Path) -> Iterator[Entry]:
    """Yield the entries of a folder in a stable order.

    Raises:
        StagingError: Users may not read an entry, or it is not a file, folder or link.
    """
    yield _describe(root, "", os.lstat(root))
    pending = [""]
    while pending:
        folder = pending.pop()
        subfolders = []
        for item in sorted(os.scandir(root / folder), key=lambda item: item.name):
            path = f"{folder}/{item.name}" if folder else item.name
            entry = _describe(root, path, item.stat(follow_symlinks=False))
            if entry["kind"] == "folder":
                subfolders.append(path)
            yield entry
        pending.extend(reversed(subfolders))


def _describe(root: Path, path: str, status: os.stat_result) -> Entry:
    mode = stat.S_IMODE(status.st_mode) & 0o777
    entry = {"path": path, "kind": "file", "mode": mode, "size": 0, "mtime": status.st_mtime_ns, "target": ""}
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise StagingError(f"{path!a}: the name is not UTF-8") from None
    if stat.S_ISLNK(status.st_mode):
        return entry | {"kind": "link", "mode": 0, "mtime": 0, "target": str((root / path).readlink())}
    if stat.S_ISDIR(status.st_mode):
        _require(path, mode, _OTHERS_ENTER)
        return entry | {"kind": "folder", "mtime": 0 if path else status.st_mtime_ns}
    if not stat.S_ISREG(status.st_mode):
        raise StagingError(f"{path} is neither a file nor a folder nor a link")
    _require(path, mode, _OTHERS_READ)
    return entry | {"size": status.st_size}


def _require(path: str, mode: int, needed: int) -> None:
    if mode & needed != needed:
        raise StagingError(
            f"{path or 'the folder itself'} (mode {mode:04o}) may not be read by all users, and all users would read "
            "the copy"
        )


def summarise(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return digest, number of files and bytes of a list of entries."""
    digest, files, size = hashlib.sha256(), 0, 0
    for entry in entries:
        digest.update(json.dumps(entry, sort_keys=True).encode() + b"\n")
        files += entry["kind"] == "file"
        size += entry["size"]
    return {"digest": digest.hexdigest(), "files": files, "bytes": size}


# -- where entries come from ------------------------------------------------------------------------------------------

#: An entry, and the chunks of its content.
Item = tuple[Entry, Iterator[bytes]]


def read_folder(root: Path) -> Iterator[Item]:
    """Yield the entries of a folder with their contents.

    Raises:
        StagingError: As for `list_entries`, or a file changed while it was read.
    """
    for entry in list_entries(root):
        yield entry, _read_file(root / entry["path"], entry) if entry["kind"] == "file" else iter(())


def _read_file(path: Path, entry: Entry) -> Iterator[bytes]:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
        left = entry["size"]
        while left and (chunk := file.read(min(left, _CHUNK))):
            left -= len(chunk)
            yield chunk
        status = os.fstat(file.fileno())
    if left or (status.st_size, status.st_mtime_ns) != (entry["size"], entry["mtime"]):
        raise StagingError(f"{entry['path']} changed while it was copied")


def receive(stream: BinaryIO, secret: str) -> Iterator[Item]:
    """Yield what the previous node sends.

    Raises:
        StagingError: The stream ends early, is another one, or a content does not have its hash.
    """
    if not hmac.compare_digest(_read_exactly(stream, len(secret)), secret.encode()):
        raise StagingError("the previous node sent another secret")
    while length := struct.unpack(">I", _read_exactly(stream, 4))[0]:
        if length > _MAX_HEADER:
            raise StagingError("the previous node sent an entry that is too long")
        entry: Entry = json.loads(_read_exactly(stream, length))
        yield entry, _receive_file(stream, entry) if entry["kind"] == "file" else iter(())


def _receive_file(stream: BinaryIO, entry: Entry) -> Iterator[bytes]:
    digest, left = hashlib.sha256(), entry["size"]
    while left:
        chunk = _read_exactly(stream, min(left, _CHUNK))
        left -= len(chunk)
        digest.update(chunk)
        yield chunk
    if _read_exactly(stream, _HASH_BYTES) != digest.digest():
        raise StagingError(f"{entry['path']} arrived with other contents than were sent")


def _read_exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise StagingError("the previous node stopped sending")
    return data


# -- where entries go -------------------------------------------------------------------------------------------------


class FolderWriter:
    """Writes entries to a folder that exists and is empty or has an earlier, interrupted copy."""

    def __init__(self, root: Path, spare: int = 0) -> None:
        """Write below `root`, on whose disk `spare` bytes remain free."""
        self._root = root
        self._spare = spare
        self._folders: list[Entry] = []

    def write(self, entry: Entry, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Write an entry while passing its chunks on."""
        path = self._locate(entry["path"])
        if entry["kind"] == "folder":
            self._folders.append(entry)
            path.mkdir(mode=0o700, exist_ok=True)
            path.chmod(0o700)
            return
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        if entry["kind"] == "link":
            path.symlink_to(entry["target"])
            return
        with path.open("xb") as file:
            for chunk in chunks:
                # Another copy may be written to the same disk.
                check_space(self._root, len(chunk) + self._spare)
                file.write(chunk)
                yield chunk
            file.flush()
            os.fchmod(file.fileno(), entry["mode"])
            os.utime(file.fileno(), ns=(entry["mtime"], entry["mtime"]))

    def finish(self) -> None:
        """Bring everything to the disk, and then give the first folder its time, by which a copy is known as whole."""
        for entry in reversed(self._folders):
            path = self._locate(entry["path"])
            path.chmod(entry["mode"])
            if not entry["path"]:
                _sync_file_system(path)
                os.utime(path, ns=(entry["mtime"], entry["mtime"]))

    def _locate(self, path: str) -> Path:
        if path.startswith("/") or ".." in path.split("/"):
            raise StagingError(f"{path!r} leads out of the dataset")
        return self._root / path


def _sync_file_system(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(folder):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(folder)


class Sender:
    """Sends entries to the next node. Its failure is noted, and the copy on this node continues."""

    def __init__(self, host: str, secret: str) -> None:
        #: Why nothing more is sent; None while all is well.
        self.error: str | None = None
        self._peer: socket.socket | None = None
        with self._failing():
            self._peer = _connect(host)
            self._peer.sendall(secret.encode())

    def write(self, entry: Entry, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Send an entry while passing its chunks on."""
        header, digest = json.dumps(entry).encode(), hashlib.sha256()
        self._send(struct.pack(">I", len(header)) + header)
        for chunk in chunks:
            digest.update(chunk)
            self._send(chunk)
            yield chunk
        if entry["kind"] == "file":
            self._send(digest.digest())

    def finish(self) -> None:
        """End the stream."""
        self._send(struct.pack(">I", 0))
        self.close()

    def close(self) -> None:
        """Close the connection; without the end, the next node's copy fails."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def _send(self, data: bytes) -> None:
        with self._failing():
            if self._peer is not None:
                self._peer.sendall(data)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = f"the next node cannot be reached: {error.strerror or error}"
            self.close()


def _connect(host: str) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            peer = socket.create_connection((host, PORT), timeout=_SILENCE_S)
        except OSError:
            # Its name or its port is not known yet.
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
        else:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return peer


@contextlib.contextmanager
def accept_previous() -> Iterator[BinaryIO]:
    """Wait for the previous node, and return its stream.

    Raises:
        StagingError: It does not connect.
    """
    with socket.create_server(("", PORT)) as listener:
        listener.settimeout(_CONNECT_S)
        try:
            peer, _ = listener.accept()
        except TimeoutError:
            raise StagingError(f"the previous node did not connect within {_CONNECT_S:.0f} s") from None
    with peer:
        peer.settimeout(_SILENCE_S)
        with peer.makefile("rb", buffering=_CHUNK) as stream:
            yield cast("BinaryIO", stream)


# -- tasks ------------------------------------------------------------------------------------------------------------


def copy(task: dict[str, Any], secret: str, report: Callable[[dict[str, Any]], None]) -> None:
    """Copy a dataset as the task says, and report the end.

    Raises:
        StagingError: The copy is not whole.
    """
    folder = None if task["write"] is None else Path(task["write"])
    if folder is not None:
        check_space(folder, task["bytes"] + task["spare"])
    with contextlib.ExitStack() as stack:
        sender = None
        if task["next"] is not None:
            sender = Sender(task["next"], secret)
            stack.callback(sender.close)
        writer = None if folder is None else FolderWriter(folder, task["spare"])
        sinks: list[FolderWriter | Sender] = [sink for sink in (writer, sender) if sink is not None]
        if task["read"] is None:
            items = receive(stack.enter_context(accept_previous()), secret)
        else:
            items = read_folder(Path(task["read"]))
        summary = summarise(_pass_through(items, sinks, report))
        if summary["digest"] != task["digest"]:
            raise StagingError("the dataset changed since it was listed: start again")
        for sink in sinks:
            sink.finish()
    if folder is not None and summarise(list_entries(folder))["digest"] != task["digest"]:
        raise StagingError("this node's disk does not hold what was written")
    report({"done": True, "next_error": None if sender is None else sender.error})


def _pass_through(
    items: Iterator[Item], sinks: list[FolderWriter | Sender], report: Callable[[dict[str, Any]], None]
) -> Iterator[Entry]:
    copied, reported_at = 0, time.monotonic()
    for entry, content in items:
        chunks = content
        for sink in sinks:
            chunks = sink.write(entry, chunks)
        for chunk in chunks:
            copied += len(chunk)
            if time.monotonic() - reported_at > _REPORT_S:
                report({"copied": copied})
                reported_at = time.monotonic()
        yield entry


def check_space(folder: Path, needed: int) -> None:
    """Check that a folder's file system has this many bytes free.

    Raises:
        StagingError: It has not.
    """
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < needed:
        raise StagingError(
            f"the copy and the space to be left free need {needed / 1e9:.1f} GB, and the disk has {free / 1e9:.1f} GB"
        )


def run(task: dict[str, Any], secret: str, report: Callable[[dict[str, Any]], None]) -> None:
    """Do a task.

    Raises:
        StagingError: It failed; the text says why.
    """
    try:
        if task["do"] == "list":
            report(summarise(list_entries(Path(task["folder"]))))
        else:
            copy(task, secret, report)
    except PermissionError as error:
        raise StagingError(
            f"{error.filename} may not be read by all users, and all users would read the copy"
        ) from error
    except FileNotFoundError as error:
        raise StagingError(f"there is no {error.filename}") from error
    except TimeoutError as error:
        raise StagingError(f"the other node sent nothing for {_SILENCE_S:.0f} s") from error
    except OSError as error:
        raise StagingError(f"{error.filename or 'the copy'}: {error.strerror or error}") from error


def main() -> None:
    """Do the task in the first argument."""
    try:
        run(json.loads(sys.argv[1]), os.environ.get("GPUHUB_STAGING_SECRET", ""), _print)
    except StagingError as error:
        _print({"error": str(error)})
        sys.exit(1)


def _print(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
