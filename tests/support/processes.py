"""Processes of this machine, told by what they were started with."""

from __future__ import annotations

from pathlib import Path


def with_home(home: Path) -> dict[int, str]:
    """Those that were started with this HOME: their command lines by id."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"HOME={home}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found
