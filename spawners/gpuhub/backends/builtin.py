"""The builtin backend and its plugin: its scheduler alone decides, within the ledger's transactions."""

from __future__ import annotations

from collections.abc import Mapping

from gpuhub.backends.interface import ExternalUsage, Observation, SchedulingBackend
from gpuhub.backends.plugin import BackendPlugin
from gpuhub.broker_api.schemas import Capabilities
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.domain.models import LeaseRow
from gpuhub.scheduler.interface import Scheduler, build_parameters
from gpuhub.scheduler.scheduler import BuiltinScheduler

CAPABILITIES = Capabilities()


class BuiltinBackend(SchedulingBackend):
    """gpuhub's own scheduler. It is not polled: a lease is granted by the transaction that makes it possible."""

    name = "builtin"
    title = "gpuhub"

    def __init__(self, cluster: ClusterSettings, scheduler: Scheduler | None = None) -> None:
        self._scheduler = scheduler or BuiltinScheduler(build_parameters(cluster.scheduling))

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    async def observe(self) -> Observation:
        return Observation()

    async def submit(self, lease: LeaseRow) -> int | None:
        return None

    async def cancel(self, jobs: Mapping[str, int]) -> None:
        return

    async def extend(self, lease: LeaseRow, seconds: int) -> None:
        return

    def external_usage(self, now: float) -> ExternalUsage:
        return ExternalUsage()


class BuiltinPlugin(BackendPlugin):
    """The plugin of gpuhub's own scheduler; notebooks are containers."""

    name = "builtin"
    title = "gpuhub"

    def capabilities(self, cluster: ClusterSettings) -> Capabilities:
        return CAPABILITIES

    def build(self, cluster: ClusterSettings, paths: Paths) -> SchedulingBackend:
        return BuiltinBackend(cluster)


PLUGIN = BuiltinPlugin()
