"""A tar of somebody else's making into a folder, and nowhere else.

Written out rather than left to tarfile's filters, which Python has from 3.11.4 on only.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from pathlib import Path, PurePosixPath

from gpu_launch.errors import GpuLaunchError

#: Bytes at once.
_BLOCK = 1024 * 1024


def unpack(tar: tarfile.TarFile, target: Path, *, into: bool) -> tuple[int, int]:
    """Write a tar, whose members begin with the one name that was asked for, as `target`, or `into` the folder that it
    is. Files and bytes. Raises GpuLaunchError for a member that leads out of it, or that cannot be written.
    """
    files = size = 0
    try:
        for member in tar:
            path = _place(member.name, target, into=into)
            _refuse_links_above(path, target)
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.issym():
                _link(path, member.linkname, target)
            elif member.isreg():
                _write(tar, member, path)
                size += member.size
            else:
                raise GpuLaunchError(f"{member.name} is neither file, folder nor symbolic link.")
            files += 1
    except tarfile.TarError as error:
        raise GpuLaunchError(f"What came is no whole tar: {error}.") from None
    except OSError as error:
        raise GpuLaunchError(f"{error.filename or target} cannot be written: {error.strerror or error}.") from None
    return files, size


def _place(name: str, target: Path, *, into: bool) -> Path:
    """Where a member goes."""
    parts = PurePosixPath(name).parts
    # A name that is harmless on a POSIX system may be a path, a drive or a stream on Windows.
    is_odd = os.name == "nt" and any(char in name for char in '\\:*?"<>|')
    if name.startswith("/") or ".." in parts or "\0" in name or is_odd:
        raise GpuLaunchError(f"{name!r} leads out of the folder, or is no name here; nothing more was copied.")
    return target.joinpath(*(parts if into else parts[1:]))


def _refuse_links_above(path: Path, target: Path) -> None:
    """A link that came before must not lead what comes after it elsewhere."""
    for above in path.parents:
        if above == target or not above.is_relative_to(target):
            return
        if above.is_symlink():
            raise GpuLaunchError(f"{above} is a symbolic link; nothing is copied through it.")


def _link(path: Path, text: str, target: Path) -> None:
    to = Path(os.path.normpath(path.parent / text))
    if Path(text).is_absolute() or not to.is_relative_to(os.path.normpath(target)):
        raise GpuLaunchError(f"{path} would be a link to {text}, outside of what is copied.")
    path.unlink(missing_ok=True)
    path.symlink_to(text)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = tar.extractfile(member)
    if path.is_symlink():
        path.unlink()
    if source is not None:
        with path.open("wb") as opened:
            shutil.copyfileobj(source, opened, _BLOCK)
    if member.mode & stat.S_IXUSR:
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    os.utime(path, (member.mtime, member.mtime))
