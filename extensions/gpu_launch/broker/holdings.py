"""What a user holds already while a request of the same user waits, and what frees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpu_launch.broker.client import BrokerClient
from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.broker.models import Gpu, Job, Lease
from gpu_launch.errors import BrokerError

#: Names of jobs that a notebook requests for itself.
LAUNCH, RANKS, CLUSTER, CELL = "%gpu_launch", "%gpu_ranks", "ipp.Cluster", "%%gpu"
#: Commands that free the GPUs of such a job in the notebook that requested it.
_OWN_COMMANDS = {RANKS: "%gpu_ranks --stop", CLUSTER: "cluster.stop_cluster_sync()", CELL: "%gpu --stop"}


@dataclass(frozen=True, kw_only=True)
class Holding:
    """GPUs of one job or notebook of the user."""

    #: The job's name, or the notebook server's; may be empty.
    name: str
    #: The job's run; None for a notebook.
    run_id: str | None
    gpus: tuple[Gpu, ...]

    def describe(self, *, cancel: str) -> str:
        """Return what it is, where, and what frees it. `cancel` is the command that ends a run."""
        counts = Counter((gpu.node, gpu.model) for gpu in self.gpus)
        places = ", ".join(
            f"{node} {f'{count} × ' if count > 1 else ''}{model}" for (node, model), count in sorted(counts.items())
        )
        if self.run_id is None:
            what = f"notebook {self.name!r}" if self.name else "notebook"
            return f"{what} ({places}): stop it on the hub's Home page"
        own = _OWN_COMMANDS.get(self.name)
        other = f"{own} in its notebook, or " if own else ""
        return f"{self.name or 'launch'} {self.run_id} ({places}): {other}{cancel} {self.run_id}"


def list_holdings(
    broker: BrokerClient, waiting: Sequence[Job], demand: GpuRequest, *, server: str | None
) -> tuple[Holding, ...]:
    """Return what the owner of waiting jobs holds of the kind that they request; nothing if the broker does not answer.

    Args:
        broker: The broker's client.
        waiting: The jobs of one request.
        demand: The GPUs that they request.
        server: The notebook server that requests them, which does not count; None on a laptop.
    """
    try:
        jobs, leases = broker.list_jobs(), broker.list_leases()
    except BrokerError:
        return ()
    return find_holdings(jobs, leases, waiting, demand, server=server)


def find_holdings(
    jobs: Iterable[Job], leases: Iterable[Lease], waiting: Sequence[Job], demand: GpuRequest, *, server: str | None
) -> tuple[Holding, ...]:
    """Return the holdings among an owner's jobs and leases, see `list_holdings`."""
    # Administrators get the jobs and leases of all users.
    owners, own_ids = {job.owner for job in waiting}, {job.id for job in waiting}
    found = [
        Holding(name=lease.server, run_id=None, gpus=lease.gpus)
        for lease in leases
        if lease.is_notebook and lease.is_granted and lease.owner in owners and lease.server != server
    ]
    found += [
        Holding(name=job.name, run_id=job.run_id, gpus=tuple(gpu for worker in job.workers for gpu in worker.gpus))
        for job in jobs
        if job.is_granted and job.owner in owners and job.id not in own_ids
    ]
    return tuple(holding for holding in found if any(demand.accepts(gpu) for gpu in holding.gpus))


def format_holdings(holdings: Sequence[Holding], *, cancel: str) -> list[str]:
    """Return one line for each holding below a heading; nothing for none."""
    if not holdings:
        return []
    return ["you hold GPUs yourself that this request could use:"] + [
        f"  {holding.describe(cancel=cancel)}" for holding in holdings
    ]
