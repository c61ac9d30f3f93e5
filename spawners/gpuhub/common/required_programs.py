"""The list of programs that gpuhub starts (`programs.txt`), and which of them are missing on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class RequiredProgram:
    """A program, the Debian package that has it, and where it is needed; `programs.txt` explains the places."""

    where: str
    name: str
    package: str


def read_programs() -> tuple[RequiredProgram, ...]:
    """Return the whole list."""
    text = resources.files("gpuhub.common").joinpath("programs.txt").read_text(encoding="utf-8")
    lines = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return tuple(RequiredProgram(where, name, package) for where, name, package in lines)


def find_missing_packages(where: Collection[str]) -> list[str]:
    """Return the packages of the programs that are needed in these places and missing here, in order."""
    return sorted(
        {
            program.package
            for program in read_programs()
            if program.where in where and shutil.which(program.name) is None
        }
    )
