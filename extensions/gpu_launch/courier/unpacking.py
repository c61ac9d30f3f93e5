"""One member of a tar into a folder and nowhere else. `tarfile`'s own filters came with Python 3.11.4 only."""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
from pathlib import Path

from gpu_launch.courier.frames import Refused


def unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Make the member below the folder; a file or link that is there already is replaced. Nobody else may write it.

    Raises Refused for members that lead out of the folder, and for those that are neither files, folders nor links.
    """
    root = folder.resolve()
    parts = Path(member.name).parts
    if Path(member.name).is_absolute() or ".." in parts:
        raise _leads_out(member)
    target = root.joinpath(*parts)
    if member.isdir():
        _refuse_outside(root, target, member)
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.chmod(member.mode & 0o755 | 0o700)
        return
    _refuse_outside(root, target.parent, member)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if member.issym():
        _refuse_outside(root, target.parent / member.linkname, member)
        _make_room(target)
        target.symlink_to(member.linkname)
    elif member.islnk():
        _refuse_outside(root, root / member.linkname, member)
        _make_room(target)
        target.hardlink_to(root / member.linkname)
    elif member.isreg():
        _write(tar, member, target)
    else:
        raise Refused("invalid", f"{member.name}: only files, folders and links can be sent")


def _refuse_outside(root: Path, place: Path, member: tarfile.TarInfo) -> None:
    """A place with all links on the way followed: an earlier member, or the user, may have made them."""
    if not place.resolve().is_relative_to(root):
        raise _leads_out(member)


def _leads_out(member: tarfile.TarInfo) -> Refused:
    return Refused("invalid", f"{member.name}: members may not lead out of the folder")


def _make_room(target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        target.unlink()


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    content = tar.extractfile(member)
    _make_room(target)
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        if content is not None:
            shutil.copyfileobj(content, file, 256 * 1024)
            if file.tell() != member.size:
                raise tarfile.ReadError("unexpected end of data")
    target.chmod(member.mode & 0o755 | 0o600)
    with contextlib.suppress(OSError, OverflowError):
        os.utime(target, (member.mtime, member.mtime))
