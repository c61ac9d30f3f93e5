"""The entry point of the builtin backend."""

from __future__ import annotations

from gpuhub.backends.builtin.backend import CAPABILITIES, BuiltinBackend
from gpuhub.backends.interface import SchedulingBackend
from gpuhub.backends.plugin import BackendPlugin
from gpuhub.broker_api.schemas import Capabilities
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings


class BuiltinPlugin(BackendPlugin):
    """The plugin of gpuhub's own scheduler; notebooks are containers."""

    name = "builtin"
    title = "gpuhub"

    def capabilities(self, cluster: ClusterSettings) -> Capabilities:
        return CAPABILITIES

    def build(self, cluster: ClusterSettings, paths: Paths) -> SchedulingBackend:
        return BuiltinBackend(cluster)


PLUGIN = BuiltinPlugin()
