"""A small container image made of this machine's own files: a shell, Python and NVIDIA's package for it."""

from __future__ import annotations

import _ctypes
import _ssl
import io
import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pynvml

_PROGRAMS = ("dash", "cat", "ls", "grep", "sleep", "id", "hostname", "nsenter")
_TEMPORARY = ("tmp", "var/tmp")
_FOLDERS = ("dev", "etc", "proc", "run", "sys", "var", "var/lib", *_TEMPORARY)
_UNNEEDED = ("test", "idlelib", "ensurepip", "tkinter", "lib2to3", "pydoc_data", "dist-packages", "__pycache__")


def build_root_filesystem() -> bytes:
    """Build the root file system of the image as a tar archive."""
    standard = Path(sysconfig.get_path("stdlib"))
    python = Path(sys.executable).resolve()
    programs = [python, *(Path("/usr/bin") / name for name in _PROGRAMS)]
    binaries = [*programs, Path(_ctypes.__file__), Path(_ssl.__file__)]
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", dereference=True) as tar:
        for name, target in {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64"}.items():
            _add_link(tar, name, target)
        for folder in _FOLDERS:
            entry = tarfile.TarInfo(folder)
            # Older runc gives a file system that it mounts the mode of the folder below.
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder in _TEMPORARY else 0o755
            tar.addfile(entry)
        for file in sorted({*programs, *find_libraries(binaries)}):
            tar.add(file, arcname=path_under_usr(file))
        tar.add(standard, arcname=path_under_usr(standard), filter=_needed)
        tar.add(pynvml.__file__, arcname=f"{path_under_usr(standard)}/pynvml.py")
        _add_link(tar, "usr/bin/sh", "dash")
        if python.name != "python3":
            _add_link(tar, "usr/bin/python3", python.name)
    return output.getvalue()


def find_libraries(binaries: list[Path]) -> set[Path]:
    listed = subprocess.run(["ldd", *map(str, binaries)], check=False, capture_output=True, text=True).stdout
    words = (word for line in listed.splitlines() if not line.endswith(":") for word in line.split())
    return {Path(word) for word in words if word.startswith("/")}


def path_under_usr(path: Path) -> str:
    text = os.fspath(path).lstrip("/")
    return text if text.startswith("usr/") else f"usr/{text}"


def _needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = entry.name.split("/")
    return None if any(part in _UNNEEDED or part.startswith("config-") for part in parts) else entry


def _add_link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)
