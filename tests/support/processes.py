"""Processes of this machine by their environment."""

from __future__ import annotations

from pathlib import Path


def find_processes(home: Path) -> dict[int, str]:
    """Return the command lines, by id, of the processes that were started with this HOME."""
    commands = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"HOME={home}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                commands[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return commands
