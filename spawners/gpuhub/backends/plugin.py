"""What a scheduling backend brings along (how it is built, and what the hub's side must know of it), and which ones are
installed, found by entry point.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.broker_api.schemas import Capabilities, PartitionView
from gpuhub.common.errors import SettingsError
from gpuhub.common.paths import Paths
from gpuhub.config.backends import find_backends
from gpuhub.config.settings import ClusterSettings, ProfileSettings
from gpuhub.config.slurm import find_misplaced_slurm_keys, find_missing_docker


class BackendPlugin(ABC):
    """One backend, as its entry point in the group `gpuhub.scheduling_backends` names it."""

    #: Its name in cluster.toml; the entry point has the same.
    name: str
    #: Its name for people.
    title: str

    @abstractmethod
    def capabilities(self, cluster: ClusterSettings) -> Capabilities:
        """Return what it offers with these settings."""

    @abstractmethod
    def build(self, cluster: ClusterSettings, paths: Paths) -> SchedulingBackend:
        """Return the backend for a broker's process."""

    def check_settings(self, cluster: ClusterSettings) -> Iterator[str]:
        """Return one line for each key of cluster.toml that does not go with this backend."""
        yield from find_misplaced_slurm_keys(cluster)
        if self.capabilities(cluster).external_jobs:
            for node in cluster.nodes:
                if node.groups:
                    yield f"nodes: {node.name}: groups: {self.title} decides whose jobs run on a node: remove it"
        if self.capabilities(cluster).containers:
            yield from find_missing_docker(cluster)

    # -- the hub's side -------------------------------------------------------------------------------------------

    def spawner_class(self, cluster: ClusterSettings) -> str:
        """Return what starts notebooks, by its name in the entry point group `jupyterhub.spawners`."""
        return "gpuhub-docker"

    def notebook_command(self, cluster: ClusterSettings) -> list[str]:
        """Return the notebook's program, without options."""
        return ["jupyterhub-singleuser"]

    def describe_terms(
        self, cluster: ClusterSettings, profile: ProfileSettings, partition: PartitionView | None, limits: str
    ) -> str:
        """Return the terms of the backend's job for a profile, for the spawn form; empty where there are none.

        Args:
            cluster: The settings.
            profile: The profile.
            partition: The queue that the profile uses, as the broker reports it; None where it does not.
            limits: That queue's limits in words, such as `up to 8 h`; may be empty.
        """
        return ""

    # -- gpuhub up and down ---------------------------------------------------------------------------------------

    async def check_site(self, cluster: ClusterSettings) -> None:  # noqa: B027 - there may be nothing to check
        """Check, before anything is started, that the backend has everything that the settings name.

        Raises:
            SetupError: It gives no answer, or its version is too old.
            SettingsError: A line for each thing that it does not have, or would never grant.
        """

    async def cancel_jobs(self, cluster: ClusterSettings, instance: str) -> None:  # noqa: B027 - there may be no jobs
        """Cancel all jobs that stand for leases of this instance; all other jobs stay.

        Raises:
            GpuhubError: Some may still be there.
        """

    def describe_commands(self, cluster: ClusterSettings) -> Sequence[str]:
        """Return lines for an administrator about the backend's own commands, shown after a start."""
        return ()


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
