"""The lab's own recipes: files of a folder on the head node, which users' gpu-launch reads."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
from pathlib import Path

from gpuhub.broker_api.schemas import RecipeView

#: Maximum number of files that are handed out.
MAX_FILES = 100
#: Maximum size of such a file, bytes.
MAX_BYTES = 65536
#: Entries of the folder that are read.
_MAX_ENTRIES = 1000
_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}\.yaml")

log = logging.getLogger(__name__)


class RecipeOperations:
    """Reads the folder again for each caller, so that a new file needs no restart.

    Args:
        folder: The folder; None for no recipes.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        #: Files that were left out, and why, as they were reported last.
        self._reported: set[str] = set()

    async def list_recipes(self) -> list[RecipeView]:
        """Return the recipes by name; what cannot be handed out is left out, and reported in the log once."""
        return [] if self._folder is None else await asyncio.to_thread(self._read, self._folder)

    def _read(self, folder: Path) -> list[RecipeView]:
        views, problems = [], set()
        try:
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry, _ in zip(entries, range(_MAX_ENTRIES), strict=False))
        except OSError as error:
            names = []
            problems.add(f"{folder}: {error.strerror}")
        for name in names:
            if not name.endswith((".yaml", ".yml")) or name.startswith("."):
                continue
            try:
                views.append(_read_recipe(folder / name))
            except (OSError, ValueError) as error:
                problems.add(f"{folder / name}: {error}")
        if len(views) > MAX_FILES:
            problems.add(f"{folder}: {len(views)} recipes; the first {MAX_FILES} are handed out")
        for problem in sorted(problems - self._reported):
            log.warning("a recipe is left out: %s", problem)
        self._reported = problems
        return views[:MAX_FILES]


def _read_recipe(path: Path) -> RecipeView:
    """Return one recipe.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not a file that can be handed out.
    """
    if not _NAME.fullmatch(path.name):
        raise ValueError("its name must be lower-case letters, digits and dashes, and end in .yaml")
    # A pipe would be waited for without O_NONBLOCK; a link could lead to what users may not read.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_mode & stat.S_IWOTH:
            raise ValueError("all users of this machine may write it: chmod o-w")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return RecipeView(name=path.stem, text=data.decode())
