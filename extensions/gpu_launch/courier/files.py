"""Files into a home and out of it, as tar."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gpu_launch.courier.frames import Incoming, Refused
from gpu_launch.courier.unpacking import unpack

_BLOCK = 256 * 1024
_GZIP = b"\x1f\x8b"


def below(home: Path, path: str) -> Path:
    """A path of the home. Raises Refused where it leads out of it, over a symbolic link say."""
    found = home / path
    is_inside = not Path(path).is_absolute() and ".." not in Path(path).parts and "\0" not in path
    if not is_inside or not found.resolve().is_relative_to(home.resolve()):
        raise Refused("invalid", f"{path}: this leads out of the home")
    return found


def put(home: Path, path: str, limit: int, incoming: Incoming) -> dict[str, int]:
    """Unpack a tar, compressed by gzip or not, below a folder of the home, which is made where it is missing. Returns
    how many files and bytes came.

    Raises Refused for more than `limit` bytes, for what is no tar, and for members that lead out of the folder or are
    neither files, folders nor links.
    """
    folder = below(home, path)
    data = io.BufferedReader(incoming, _BLOCK)
    files = size = 0
    try:
        with tarfile.open(fileobj=data, mode="r|gz" if data.peek(2)[:2] == _GZIP else "r|") as tar:
            _make_folder(home, folder)
            for member in tar:
                size += member.size if member.isreg() else 0
                files += 0 if member.isdir() else 1
                if size > limit:
                    raise Refused("too-large", f"it unpacks to more than the {limit} bytes that may be sent at once")
                unpack(tar, member, folder)
    except OSError as error:
        if error.errno is not None:
            raise
        raise Refused("invalid", f"this is no whole tar: {error}") from None
    except (tarfile.TarError, EOFError) as error:
        raise Refused("invalid", f"this is no whole tar: {error}") from None
    while data.read(_BLOCK):
        pass  # what stands after the tar's own end, up to the end frame
    return {"files": files, "bytes": size}


def _make_folder(home: Path, folder: Path) -> None:
    missing = [one for one in (folder, *folder.parents) if one != home and one.is_relative_to(home)]
    for one in reversed(missing):
        with contextlib.suppress(FileExistsError):
            one.mkdir(mode=0o700)
    if not folder.is_dir():
        raise Refused("invalid", f"{folder.relative_to(home)} is a file, and no folder to unpack in")


def find(home: Path, path: str, limit: int) -> Path:
    """A file or folder of the home that may be fetched. Raises Refused: it is missing, or larger than `limit` bytes."""
    found = below(home, path)
    if not os.path.lexists(found):
        raise Refused("not-found", f"there is no {path!r} in the home")
    size = 0
    for one in _files(found):
        with contextlib.suppress(OSError):
            size += one.lstat().st_size
        if size > limit:
            raise Refused("too-large", f"{path} has more than the {limit} bytes that may be fetched at once")
    return found


def _files(root: Path) -> Iterator[Path]:
    yield root
    if root.is_dir() and not root.is_symlink():
        for folder, _, names in os.walk(root):
            yield from (Path(folder, name) for name in names)


def get(found: Path, sink: BinaryIO) -> dict[str, int]:
    """Write a file or folder as a tar, its own name first; what is neither file, folder nor link is left out."""
    sizes: list[int] = []

    def note(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return None
        if not member.isdir():
            sizes.append(member.size)
        return member

    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_BLOCK) as tar:
        tar.add(found, arcname=found.name or ".", filter=note)
    return {"files": len(sizes), "bytes": sum(sizes)}
