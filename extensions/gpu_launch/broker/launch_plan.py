"""The participants of a launch, for the request to the broker and for texts."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.broker.models import Gpu


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """At most `nnodes` nodes of `nproc_per_node` ranks each, and at least `least_nnodes`."""

    nnodes: int
    least_nnodes: int
    nproc_per_node: int
    #: The notebook's own container is node 0.
    includes_notebook: bool
    #: The GPUs of the notebook that take part, as the cluster knows them; empty if none do or they are unknown.
    notebook_gpus: tuple[Gpu, ...]
    #: Nodes without workers: the notebook's own if its GPUs take part or nothing else may run there.
    exclude_nodes: tuple[str, ...]
    demand: GpuRequest

    @property
    def workers(self) -> int:
        """Return the largest number of workers to request."""
        return self.nnodes - int(self.includes_notebook)

    @property
    def least_workers(self) -> int:
        """Return the number of workers without which the launch does not start."""
        return self.least_nnodes - int(self.includes_notebook)

    @property
    def is_elastic(self) -> bool:
        """Return whether it may continue with fewer nodes."""
        return self.least_nnodes < self.nnodes
