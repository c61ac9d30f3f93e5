"""The scheduling backends that are installed, which the key `engine` of cluster.toml may name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

#: Their entry points.
BACKEND_GROUP = "gpuhub.scheduling_backends"


@cache
def find_backends() -> Mapping[str, EntryPoint]:
    """Return the entry points of the installed backends by name, in alphabetical order."""
    return {found.name: found for found in sorted(entry_points(group=BACKEND_GROUP), key=lambda point: point.name)}


def check_backend(name: str) -> str:
    """Return the name of an installed backend.

    Raises:
        ValueError: None is installed under this name; the text lists those that are.
    """
    installed = find_backends()
    if name not in installed:
        known = ", ".join(f'"{other}"' for other in installed)
        raise ValueError(f'there is no scheduling backend "{name}"; installed are: {known}')
    return name
