"""The working directory as it is sent: which files, how large, and the tar of them."""

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

from gpu_launch.cli import ignoring
from gpu_launch.errors import UsageError

#: More than this is a mistake more often than not: the home instead of a project.
MOST_FILES = 100_000
DEFAULT_MOST_BYTES = 512 * 1024**2
_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file, folder or symbolic link."""

    path: Path
    #: Below the folder that is sent.
    name: PurePosixPath
    size: int = 0
    #: Where a symbolic link points, as it is sent; empty for anything else.
    link: str = ""
    is_folder: bool = False


@dataclass(frozen=True, kw_only=True)
class Load:
    """All that is sent."""

    root: Path
    entries: tuple[Entry, ...]
    #: Left out though no rule says so, for a person: virtual environments.
    left_out: tuple[str, ...] = ()

    @property
    def files(self) -> int:
        """Files and links."""
        return sum(not entry.is_folder for entry in self.entries)

    @property
    def size(self) -> int:
        """Bytes, before compression."""
        return sum(entry.size for entry in self.entries)

    def holds(self, name: str) -> bool:
        """Whether this path is among them."""
        return any(entry.name.as_posix() == name and not entry.is_folder for entry in self.entries)


def scan(root: Path) -> Load:
    """What of a folder is sent. Raises UsageError for a link that leaves it, for too many files, and for a folder that
    is no project.
    """
    root = root.resolve()
    if not root.is_dir():
        raise UsageError(f"{root} is no folder.")
    if root == Path.home().resolve() or root.parent == root:
        raise UsageError(
            f"{root} is {'the root of all files' if root.parent == root else 'your whole home'}: change to the "
            "project's folder, or name it with --workdir. --no-workdir sends nothing."
        )
    entries: list[Entry] = []
    left_out: list[str] = []
    for entry in _walk(root, root, ignoring.levels_above(root), left_out):
        entries.append(entry)
        if len(entries) > MOST_FILES:
            raise UsageError(
                f"{root} has more than {MOST_FILES} files. Leave some out with a {ignoring.IGNORE_FILES[1]} file, "
                "written like .gitignore, or name another folder with --workdir."
            )
    return Load(root=root, entries=tuple(entries), left_out=tuple(left_out))


def scan_all(source: Path, name: str) -> Load:
    """A file or folder as it is, ignore files or not, under the name `name`. Raises UsageError for a link that leaves
    the folder.
    """
    source = source.resolve()
    top = PurePosixPath(name)
    if not source.is_dir():
        return Load(root=source.parent, entries=(Entry(path=source, name=top, size=source.stat().st_size),))
    entries = [Entry(path=source, name=top, is_folder=True)]
    for folder, folders, files in os.walk(source):
        for child in sorted([*folders, *files]):
            path = Path(folder, child)
            below = top / path.relative_to(source).as_posix()
            if path.is_symlink():
                entries.append(Entry(path=path, name=below, link=_link_text(path, source)))
            elif path.is_dir():
                entries.append(Entry(path=path, name=below, is_folder=True))
            elif path.is_file():
                entries.append(Entry(path=path, name=below, size=path.stat().st_size))
    return Load(root=source, entries=tuple(entries))


def _walk(folder: Path, root: Path, above: tuple[ignoring.Level, ...], left_out: list[str]) -> Iterator[Entry]:
    own = ignoring.read_level(folder)
    levels = above if own is None else (*above, own)
    try:
        children = sorted(os.scandir(folder), key=lambda child: child.name)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}.") from None
    for child in children:
        path = Path(child.path)
        is_folder = child.is_dir(follow_symlinks=False)
        if child.name in ignoring.NEVER or ignoring.is_ignored(path, levels, is_folder=is_folder):
            continue
        name = PurePosixPath(path.relative_to(root).as_posix())
        if child.is_symlink():
            yield Entry(path=path, name=name, link=_link_text(path, root))
        elif is_folder:
            if (path / "pyvenv.cfg").is_file():
                left_out.append(f"{name} (a virtual environment)")
                continue
            yield Entry(path=path, name=name, is_folder=True)
            yield from _walk(path, root, levels, left_out)
        elif child.is_file():
            yield Entry(path=path, name=name, size=child.stat().st_size)


def _link_text(path: Path, root: Path) -> str:
    """Where a link points, relative to its own folder. Raises UsageError when that is outside of what is sent."""
    # realpath of the link's target, which need not be there.
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(root):
        raise UsageError(
            f"{path.relative_to(root).as_posix()} is a link to {path.readlink()}, outside of the folder that is sent. "
            f"Name it in {ignoring.IGNORE_FILES[1]}, or put the file itself there."
        )
    return Path(os.path.relpath(target, path.parent)).as_posix()


def check_size(load: Load, *, most: int) -> None:
    """Raises UsageError that names the largest files, where they are more than `most` bytes in all."""
    if load.size <= most:
        return
    largest = sorted(load.entries, key=lambda entry: -entry.size)[:_NAMED]
    named = ", ".join(f"{entry.name} ({format_size(entry.size)})" for entry in largest)
    raise UsageError(
        f"{load.root} has {format_size(load.size)} to send, more than {format_size(most)}. The largest: {named}. "
        f"Name what is not needed in {ignoring.IGNORE_FILES[1]}, written like .gitignore; copy data once with "
        "`gpu-launch cp`; or allow more with --max-size."
    )


def add_to(tar: tarfile.TarFile, load: Load, *, on_bytes: Callable[[int], None] = lambda size: None) -> None:
    """Write it all into a tar. Raises UsageError for a file that became shorter meanwhile."""
    for entry in load.entries:
        add_entry(tar, entry, on_bytes=on_bytes)


def add_entry(tar: tarfile.TarFile, entry: Entry, *, on_bytes: Callable[[int], None] = lambda size: None) -> None:
    """Write one of them, as its owner's whoever that is there."""
    info = tarfile.TarInfo(entry.name.as_posix())
    try:
        found = entry.path.lstat()
    except OSError:
        raise UsageError(f"{entry.path} went away while it was sent. Run it again.") from None
    info.mtime = int(found.st_mtime)
    if entry.is_folder:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(info)
    elif entry.link:
        info.type, info.linkname = tarfile.SYMTYPE, entry.link
        tar.addfile(info)
    else:
        info.size, info.mode = entry.size, 0o755 if found.st_mode & stat.S_IXUSR else 0o644
        with _Whole(entry, on_bytes) as whole:
            tar.addfile(info, cast("Any", whole))


class _Whole:
    """A file's content, of the size that was told before. Its errors are told apart from the connection's."""

    def __init__(self, entry: Entry, on_bytes: Callable[[int], None]) -> None:
        self._path, self._left, self._on_bytes = entry.path, entry.size, on_bytes
        try:
            self._opened = entry.path.open("rb")
        except OSError as error:
            raise UsageError(f"{entry.path} cannot be read: {error.strerror}.") from None

    def read(self, size: int) -> bytes:
        """`size` bytes."""
        wanted = min(size, self._left)
        try:
            data = self._opened.read(wanted)
        except OSError as error:
            raise UsageError(f"{self._path} cannot be read: {error.strerror}.") from None
        if len(data) < wanted:
            raise UsageError(f"{self._path} became shorter while it was sent. Run it again.")
        self._left -= len(data)
        self._on_bytes(len(data))
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def add_texts(tar: tarfile.TarFile, texts: Mapping[str, bytes]) -> None:
    """Write small files that only their owner may read."""
    for name, data in texts.items():
        info = tarfile.TarInfo(name)
        info.size, info.mode, info.mtime = len(data), 0o600, int(time.time())
        tar.addfile(info, io.BytesIO(data))


def format_size(size: int) -> str:
    """`812 B`, `4.0 KiB`, `1.2 GiB`."""
    if size < 1024:
        return f"{size} B"
    power = min(3, (size.bit_length() - 1) // 10)
    return f"{size / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"
