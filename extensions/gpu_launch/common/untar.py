"""Unpacks members of an untrusted tar into one folder, with the standard library alone.

Python has tarfile's own filters only from 3.11.4 on, and those of several later versions can be led out of the folder
(CVE-2025-4330, CVE-2025-4517).
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
import stat
import tarfile
from pathlib import Path, PurePosixPath

_BLOCK = 256 * 1024
#: Characters that make a harmless POSIX name a path, a drive or a stream on Windows.
_ODD_ON_WINDOWS = '\\:*?"<>|'


class UnsafeMember(Exception):
    """A member must not be unpacked; the text says why."""


def parse_name(name: str) -> tuple[str, ...]:
    """Return the parts of a member's name.

    Raises:
        UnsafeMember: The name leads out of the folder or is not valid on this system.
    """
    parts = PurePosixPath(name).parts
    is_odd = os.name == "nt" and any(char in name for char in _ODD_ON_WINDOWS)
    if name.startswith("/") or ".." in parts or "\0" in name or is_odd:
        raise UnsafeMember(f"{name!r} leads out of the folder, or is not a valid file name here")
    return parts


def unpack_member(tar: tarfile.TarFile, member: tarfile.TarInfo, root: Path, target: Path, *, is_home: bool) -> None:
    """Unpack a member as `target`, which is `root` or below it.

    Args:
        tar: The open tar.
        member: A member whose name `parse_name` has accepted.
        root: The folder that nothing may leave.
        target: The path of the unpacked member.
        is_home: `root` belongs to the user's home. Paths may then lead through links that stay below `root`, hard
            links are allowed, existing files are replaced, and only the owner can write the new ones. Otherwise paths
            through links and hard links are refused, and existing files are overwritten.

    Raises:
        UnsafeMember: The member leads out of `root`, or has a type that is not allowed.
    """
    _check_folder(root, target if member.isdir() and is_home else target.parent, member, follow_links=is_home)
    mode = 0o700 if is_home else 0o777
    if member.isdir():
        target.mkdir(mode=mode, parents=True, exist_ok=True)
        if is_home:
            target.chmod(member.mode & 0o755 | 0o700)
        return
    target.parent.mkdir(mode=mode, parents=True, exist_ok=True)
    if member.issym():
        text = _check_link(root, target, member, follow_links=is_home)
        target.unlink(missing_ok=True)
        target.symlink_to(text)
    elif member.islnk() and is_home:
        source = root / member.linkname
        _check_folder(root, source, member, follow_links=True)
        target.unlink(missing_ok=True)
        target.hardlink_to(source)
    elif member.isreg():
        _write_file(tar, member, target, is_private=is_home)
    else:
        allowed = "files, folders and links" if is_home else "files, folders and symbolic links"
        raise UnsafeMember(f"{member.name} has a type that is not allowed: only {allowed} can be unpacked")


def _check_folder(root: Path, folder: Path, member: tarfile.TarInfo, *, follow_links: bool) -> None:
    """Check for links on the path, which an earlier member or the user may have created."""
    if follow_links:
        if not folder.resolve().is_relative_to(root.resolve()):
            raise UnsafeMember(f"{member.name} leads out of the folder")
        return
    for above in (folder, *folder.parents):
        if above == root or not above.is_relative_to(root):
            return
        if above.is_symlink():
            raise UnsafeMember(f"{above} is a symbolic link, and {member.name} would be unpacked through it")


def _check_link(root: Path, target: Path, member: tarfile.TarInfo, *, follow_links: bool) -> str:
    """Return the text of a link that does not lead out of `root`.

    Without `follow_links`, no link that other members make can change where it leads: its own folder is none, and `..`
    never follows a name.
    """
    text = member.linkname if follow_links else posixpath.normpath(member.linkname)
    destination = target.parent / text
    is_inside = "\0" not in text and destination.resolve().is_relative_to(root.resolve())
    if is_inside and not follow_links:
        is_absolute = Path(text).is_absolute() or text.startswith("/")
        is_inside = not is_absolute and Path(os.path.normpath(destination)).is_relative_to(os.path.normpath(root))
    if not is_inside:
        raise UnsafeMember(f"{member.name} is a link to {member.linkname!r}, which leads out of the folder")
    return text


def _write_file(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path, *, is_private: bool) -> None:
    if is_private or target.is_symlink():
        target.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if is_private else os.O_TRUNC) | getattr(os, "O_BINARY", 0)
    content = tar.extractfile(member)
    with os.fdopen(os.open(target, flags, 0o600 if is_private else 0o666), "wb") as file:
        if content is not None:
            shutil.copyfileobj(content, file, _BLOCK)
            if file.tell() != member.size:
                raise tarfile.ReadError("unexpected end of data")
    if is_private:
        target.chmod(member.mode & 0o755 | 0o600)
    elif member.mode & stat.S_IXUSR:
        target.chmod(target.stat().st_mode | stat.S_IXUSR)
    with contextlib.suppress(OSError, OverflowError):
        os.utime(target, (member.mtime, member.mtime))
