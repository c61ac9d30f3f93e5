"""The installed scheduling backends, found by entry point."""

from __future__ import annotations

from functools import cache

from gpuhub.backends.plugin import BackendPlugin
from gpuhub.broker_api.schemas import Capabilities
from gpuhub.common.errors import SettingsError
from gpuhub.config.backend_names import find_backends
from gpuhub.config.settings import ClusterSettings


@cache
def load_plugin(name: str) -> BackendPlugin:
    """Return the plugin of a backend.

    Raises:
        SettingsError: No backend of this name is installed, or its entry point names something else.
    """
    entry_points = find_backends()
    if name not in entry_points:
        raise SettingsError(
            f"engine: there is no scheduling backend {name!r}; installed are: {', '.join(entry_points)}"
        )
    plugin = entry_points[name].load()
    if not isinstance(plugin, BackendPlugin):
        raise SettingsError(f"engine: the entry point of the scheduling backend {name!r} is not a BackendPlugin")
    return plugin


def find_plugin(cluster: ClusterSettings) -> BackendPlugin:
    """Return the plugin of the cluster's backend.

    Raises:
        SettingsError: It is not installed.
    """
    return load_plugin(cluster.engine)


def find_capabilities(cluster: ClusterSettings) -> Capabilities:
    """Return what the cluster's backend offers.

    Raises:
        SettingsError: It is not installed.
    """
    return find_plugin(cluster).capabilities(cluster)
