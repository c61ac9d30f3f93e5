"""`cp`'s two ends: a path on this machine, and a file or folder of the home on the cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gpu_launch.cli.sending import Load, scan_all
from gpu_launch.errors import UsageError

HOME = "home"
_REMOTE = re.compile(r"([A-Za-z0-9][\w.-]+):(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Remote:
    """`RUN:path` or `home:path`."""

    #: A run as a person names it, or `home`.
    where: str
    path: str


def parse(text: str) -> Remote | Path:
    """One end. A single letter before a colon is a drive of Windows; `./a:b` is a local file for certain."""
    match = _REMOTE.fullmatch(text)
    return Path(text) if match is None else Remote(where=match[1], path=match[2])


def below(root: str, path: str) -> str:
    """A path below the home: `path` below `root`. Raises UsageError for one that leads out of it."""
    plain = path.removeprefix("~/") if root == "" else path
    parts = PurePosixPath(plain).parts
    if plain.startswith("/"):
        raise UsageError(
            f"{path}: paths on the cluster begin in your home, or in the job's folder; leave out the first /."
        )
    if ".." in parts:
        raise UsageError(f"{path}: a path on the cluster cannot have .. in it.")
    return "/".join(part for part in (root, *parts) if part not in ("", "."))


def plan_upload(source: Path, target: str, *, into: bool) -> tuple[str, Load]:
    """The remote folder, and what is unpacked there, so that `source` becomes `target`, or comes `into` it."""
    if not source.exists():
        raise UsageError(f"There is no {source}.")
    name = source.resolve().name if into or not target else target.rpartition("/")[2]
    folder = target if into or not target else target.rpartition("/")[0]
    return folder, scan_all(source, name)
