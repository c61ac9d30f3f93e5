"""Which files of a folder are not sent: Git's ignore files, and gpu-launch's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pathspec

from gpu_launch.errors import UsageError

#: Later files, and later lines, take precedence.
IGNORE_FILES = (".gitignore", ".gpulaunchignore")
#: The group in pathspec's expressions for the slash behind a folder.
_FOLDER_END = "ps_d"


@dataclass(frozen=True, kw_only=True)
class IgnoreRules:
    """The ignore rules in one folder, which also apply below it."""

    folder: Path
    spec: pathspec.GitIgnoreSpec


def read_rules(folder: Path) -> IgnoreRules | None:
    """Return the rules in this folder, None if there are none.

    Raises:
        UsageError: A file cannot be read, or a rule is not valid.
    """
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
        return IgnoreRules(folder=folder, spec=pathspec.GitIgnoreSpec.from_lines(lines))
    except ValueError as error:
        raise UsageError(f"The ignore files in {folder} cannot be understood: {error}.") from None


def read_rules_above(folder: Path) -> tuple[IgnoreRules, ...]:
    """Return the rules in the folders above, up to the root of the Git repository; none outside a repository."""
    above: list[Path] = []
    for parent in (folder, *folder.parents):
        if parent != folder:
            above.append(parent)
        if (parent / ".git").exists():
            return tuple(level for path in reversed(above) if (level := read_rules(path)) is not None)
    return ()


def is_ignored(path: Path, levels: tuple[IgnoreRules, ...], *, is_folder: bool) -> bool:
    """Apply the last rule of the nearest folder that names the path, like Git; a folder above it is not ignored."""
    for level in reversed(levels):
        name = path.relative_to(level.folder).as_posix()
        # Most paths match nothing, which pathspec finds out faster.
        if level.spec.check_file(f"{name}/" if is_folder else name).include is None:
            continue
        for rule in reversed(level.spec.patterns):
            if rule.regex is not None and _names_path(rule.regex, name, is_folder=is_folder):
                return bool(rule.include)
    return False


def _names_path(rule: re.Pattern[Any], name: str, *, is_folder: bool) -> bool:
    """Return whether a rule names the path itself: pathspec's expressions also match what is in a folder they name."""
    if any(match.groupdict().get(_FOLDER_END) is None for match in rule.finditer(name)):
        return True
    ends = (match.start(_FOLDER_END) for match in rule.finditer(f"{name}/") if _FOLDER_END in rule.groupindex)
    return is_folder and len(name) in ends
