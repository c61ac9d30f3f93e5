"""Paths of an instance whose files are in a test's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.paths import Paths


@dataclass(frozen=True, slots=True)
class FolderPaths(Paths):
    """An instance below a folder of the test's."""

    folder: Path = Path()

    @property
    def state(self) -> Path:
        return self.folder
