"""Which files of a folder are sent: what `.gitignore` and `.gpulaunchignore` leave, at every level."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pathspec

from gpu_launch.errors import UsageError

#: In this order: what a later file, or a later line, says counts.
IGNORE_FILES = (".gitignore", ".gpulaunchignore")
#: Git's own, and what Python makes anew anyway.
NEVER = frozenset({".git", "__pycache__"})


@dataclass(frozen=True, kw_only=True)
class Level:
    """One folder's own rules; they hold for all below it."""

    folder: Path
    spec: pathspec.GitIgnoreSpec


def read_level(folder: Path) -> Level | None:
    """The rules that lie in this folder; None where there are none. Raises UsageError for a rule that is none."""
    lines: list[str] = []
    for name in (".git/info/exclude", *IGNORE_FILES):
        try:
            lines += (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise UsageError(f"{folder / name} cannot be read: {error.strerror}.") from None
    if not lines:
        return None
    try:
        return Level(folder=folder, spec=pathspec.GitIgnoreSpec.from_lines(lines))
    except ValueError as error:
        raise UsageError(f"The ignore files in {folder} cannot be understood: {error}.") from None


def levels_above(folder: Path) -> tuple[Level, ...]:
    """The rules of the folders above, up to the one where Git's repository begins; none outside a repository."""
    above: list[Path] = []
    for parent in (folder, *folder.parents):
        if parent != folder:
            above.append(parent)
        if (parent / ".git").exists():
            return tuple(level for path in reversed(above) if (level := read_level(path)) is not None)
    return ()


def is_ignored(path: Path, levels: tuple[Level, ...], *, is_folder: bool) -> bool:
    """What the nearest folder with a rule for it says, as Git has it."""
    for level in reversed(levels):
        name = path.relative_to(level.folder).as_posix() + ("/" if is_folder else "")
        said = level.spec.check_file(name).include
        if said is not None:
            return bool(said)
    return False
