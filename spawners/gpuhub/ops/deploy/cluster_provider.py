"""The interface of packages that provide the nodes where there is neither a cluster.toml nor a GPU on this machine.

The practice closet is one. A provider is found by its entry point, so that gpuhub needs none to be installed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.console import StepReport
from gpuhub.ops.deploy.supervisor import Program, Supervisor

#: Entry points of providers: each is a class without arguments. The first by name is used.
ENTRY_POINTS = "gpuhub.cluster_providers"


class ClusterProvider(Protocol):
    """Nodes that are made on this machine, with the programs that they need."""

    @property
    def title(self) -> str:
        """A description of the nodes for the first line of `gpuhub up`."""

    def find_running_backend(self, supervised: Collection[str]) -> str | None:
        """Return the backend that the provider's programs among the supervised ones run; None if none of them is."""

    def write_cluster_file(self, paths: Paths, backend: str) -> Path:
        """Write the settings of the nodes for this backend, and return the file."""

    def start(
        self,
        paths: Paths,
        supervisor: Supervisor,
        cluster: ClusterSettings,
        services: Sequence[Program],
        report: StepReport,
    ) -> None:
        """Start the nodes' programs and return when they answer.

        The supervisor also gets the programs in `services`, and does not start them.
        """

    def ensure_down(self, paths: Paths, *, purge: bool) -> None:
        """Remove the nodes from this machine; `purge` removes the data as well that makes the next start quick."""

    def find_leftovers(self, paths: Paths) -> list[str]:
        """Return a line for each thing of the nodes that is still on this machine."""


def find_provider() -> ClusterProvider | None:
    """Return the installed provider; None where there is none."""
    providers = sorted(entry_points(group=ENTRY_POINTS), key=lambda entry_point: entry_point.name)
    if not providers:
        return None
    provider: ClusterProvider = providers[0].load()()
    return provider
