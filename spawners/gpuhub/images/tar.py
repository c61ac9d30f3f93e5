"""Tar streams: build contexts, and a root file system without what an image does not need."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_BLOCK = 512
_CHUNK = 1 << 20

#: These folders are left empty: made anew by Docker, of this machine rather than of the image, or for manuals.
_EMPTIED = (
    "dev",
    "proc",
    "run",
    "sys",
    "tmp",
    "usr/share/doc-base",
    "usr/share/info",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/cache/debconf",
    "var/lib/apt/lists",
    "var/log",
    "var/tmp",
)
_LEFT_OUT = {"etc/hostname", "etc/resolv.conf", "etc/machine-id", "var/lib/dbus/machine-id"}
_SETUID_SETGID = 0o6000


def stream_context(files: Mapping[str, bytes | Path]) -> Iterator[bytes]:
    """A build context: regular files of root, mode 0644; those given as paths are read piece by piece."""
    for name, content in sorted(files.items()):
        entry = tarfile.TarInfo(name)
        entry.mode = 0o644
        entry.size = content.stat().st_size if isinstance(content, Path) else len(content)
        yield entry.tobuf(tarfile.PAX_FORMAT)
        if isinstance(content, Path):
            with content.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        else:
            yield content
        yield b"\0" * (-entry.size % _BLOCK)
    yield b"\0" * (2 * _BLOCK)


def needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """The entry as it goes into the image, or None; nothing is setuid, and licences stay."""
    name = entry.name.removeprefix("./")
    if name in _LEFT_OUT or _is_manual(name):
        return None
    if any(name.startswith(f"{folder}/") for folder in _EMPTIED):
        return None
    entry.mode &= ~_SETUID_SETGID
    return entry


def _is_manual(name: str) -> bool:
    parts = name.split("/")
    return parts[:3] == ["usr", "share", "doc"] and len(parts) > 4 and parts[-1] != "copyright"


def write_root(root: Path, extra: Mapping[str, bytes], target: Path) -> None:
    """Write the root file system below `root` as a tar file; `extra` files are put on top or replace others."""
    with tarfile.open(target, "w") as tar:
        tar.add(root, arcname=".", filter=lambda entry: _unless(entry, extra))
        for name, content in sorted(extra.items()):
            _add_file(tar, f"./{name}", content)


def _unless(entry: tarfile.TarInfo, extra: Mapping[str, bytes]) -> tarfile.TarInfo | None:
    return None if entry.name.removeprefix("./") in extra else needed(entry)


def _add_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    tar.addfile(entry, io.BytesIO(content))
