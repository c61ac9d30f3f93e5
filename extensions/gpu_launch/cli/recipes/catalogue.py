"""All recipes that a user can run: those of gpu-launch, and over them the lab's own, which the broker hands out."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import gpu_launch.recipes
from gpu_launch.cli.context import Context
from gpu_launch.cli.recipes.recipe_file import MAX_SIZE, Recipe, check_name, parse_recipe
from gpu_launch.errors import BrokerError, UsageError

#: Prefix of a recipe's name, which is given in place of a script.
PREFIX = "recipe:"
SHIPPED, LAB = "gpu-launch", "lab"
_ENDINGS = (".yaml", ".yml")
_NOT_FOUND = 404


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A recipe's file, which may have mistakes."""

    name: str
    origin: str
    text: str

    def parse(self) -> Recipe:
        """Return the recipe.

        Raises:
            UsageError: naming the recipe, and what is wrong with it.
        """
        try:
            return parse_recipe(self.text, name=self.name, origin=self.origin)
        except UsageError as error:
            of_lab = " Ask your administrator to correct it." if self.origin == LAB else ""
            raise UsageError(f"{PREFIX}{self.name}: {error}{of_lab}") from None


def list_entries(context: Context) -> tuple[Entry, ...]:
    """Return all recipes by name; one of the lab's stands instead of a shipped one of the same name.

    Raises:
        BrokerError: The broker cannot be asked.
    """
    entries = {entry.name: entry for entry in _list_shipped()}
    entries |= {entry.name: entry for entry in _list_lab(context)}
    return tuple(entries[name] for name in sorted(entries))


def find_recipe(context: Context, name: str) -> Recipe:
    """Return a recipe by its name, or from a file of this machine if the name ends in `.yaml`.

    Raises:
        UsageError: There is none, or it has a mistake.
    """
    if name.lower().endswith(_ENDINGS):
        return _read_file(Path(name).expanduser())
    entries = {entry.name: entry for entry in list_entries(context)}
    if check_name(name) not in entries:
        close = difflib.get_close_matches(name, entries, n=1)
        hint = f"Did you mean {PREFIX}{close[0]}? " if close else ""
        raise UsageError(f"{PREFIX}{name}: there is no such recipe. {hint}There are {', '.join(entries)}.")
    return entries[name].parse()


def _read_file(path: Path) -> Recipe:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_SIZE + 1)
    except OSError as error:
        raise UsageError(f"{PREFIX}{path}: it cannot be read: {error.strerror}.") from None
    except UnicodeError:
        raise UsageError(f"{PREFIX}{path}: it is not a text in UTF-8.") from None
    return Entry(name=check_name(path.stem), origin=str(path), text=text).parse()


def _list_shipped() -> list[Entry]:
    folder = Path(gpu_launch.recipes.__file__).parent / "files"
    return [
        Entry(name=path.stem, origin=SHIPPED, text=path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.yaml"))
    ]


def _list_lab(context: Context) -> list[Entry]:
    try:
        views = context.broker.list_recipes()
    except BrokerError as error:
        if error.status == _NOT_FOUND:  # a broker of an older version
            return []
        raise
    return [Entry(name=str(view["name"]), origin=LAB, text=str(view["text"])) for view in views]
