"""The names of the installed scheduling backends, for the key `engine` of cluster.toml."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from gpuhub.config.settings import ClusterSettings

GROUP = "gpuhub.scheduling_backends"


class SettingsCheck(Protocol):
    """What an entry point of the group does for the settings; see `gpuhub.backends.plugin.BackendPlugin`."""

    def check_settings(self, cluster: ClusterSettings) -> Iterable[str]:
        """Return one line for each key that does not go with the backend."""
        ...


@cache
def find_backends() -> Mapping[str, EntryPoint]:
    """Return the entry points of the installed backends by name, in alphabetical order."""
    return {found.name: found for found in sorted(entry_points(group=GROUP), key=lambda point: point.name)}


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


def find_backend_mistakes(cluster: ClusterSettings) -> Iterable[str]:
    """Return one line for each key that does not go with the cluster's backend."""
    plugin = cast("SettingsCheck", find_backends()[cluster.engine].load())
    return plugin.check_settings(cluster)
