"""Nodes without Docker: Slurm alone reports their GPUs and the ends of jobs.

The job itself is what runs there. Nothing can read the UUIDs of its GPUs, so they get some that say where they are. The
end of its job proves that a lease's GPUs are free. Which GPUs have failed is in the reasons for which
`slurm_client/health.sh` has drained their nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from gpuhub.backends.slurm.gpu_drains import parse_problems
from gpuhub.common import gpu as gpus
from gpuhub.common import names
from gpuhub.common.errors import Conflict
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.containers.user_containers import WorkerSpec
from gpuhub.domain import lease_states
from gpuhub.domain.models import LeaseRow
from gpuhub.nodes.status import GpuReading, NodeStatus
from gpuhub.slurm_client.models import LIVE_STATES, SlurmJob, SlurmJobState, SlurmNode, SlurmSnapshot

#: Value in place of a Docker daemon's id.
_WITNESS = "slurm"
_MIB = 1024**2


def build_nodes(
    cluster: ClusterSettings, before: Mapping[str, NodeStatus], snapshot: SlurmSnapshot, monotonic: float
) -> tuple[NodeStatus, ...]:
    """Return the nodes of cluster.toml as Slurm reports them; `before` is what was known of each."""
    theirs = {node.name: node for node in snapshot.nodes}
    return tuple(
        build_node(cluster, before[node.name], theirs.get(node.slurm_name), monotonic) for node in cluster.nodes
    )


def find_cleared(snapshot: SlurmSnapshot, leases: Mapping[str, LeaseRow]) -> dict[str, list[str]]:
    """Return by node the ending leases of which nothing is left there."""
    cleared: defaultdict[str, list[str]] = defaultdict(list)
    remaining = {job.id for job in snapshot.jobs if may_run(job)}
    for lease in leases.values():
        for node in find_clear_nodes(lease, remaining):
            cleared[node].append(lease.id)
    return dict(cleared)


def name_worker(spec: WorkerSpec) -> str:
    """Return the stand-in for a worker's container: nothing is started, since the granted job runs the worker.

    Raises:
        Conflict: The lease has no job.
    """
    if spec.slurm_job is None:
        raise Conflict(f"lease {spec.lease_id} has no Slurm job that could run its workers")
    return names.slurm_container_id(spec.slurm_job)


def may_run(job: SlurmJob) -> bool:
    """Return whether anything of a job may be on its nodes."""
    return job.state in LIVE_STATES or job.state is SlurmJobState.COMPLETING or job.is_completing


def find_clear_nodes(lease: LeaseRow, remaining: set[int]) -> tuple[str, ...]:
    """Return the nodes that are clear of an ending lease: all, once its job has ended.

    What an elastic job releases while it continues is not clear before all of it is.
    """
    if lease.state not in lease_states.ENDING or lease.slurm_job in remaining:
        return ()
    return lease_states.list_unproven_nodes(lease)


def build_node(cluster: ClusterSettings, before: NodeStatus, node: SlurmNode | None, monotonic: float) -> NodeStatus:
    """Return a node as Slurm reports it; `node` is None where Slurm does not know it."""
    if node is None:
        since = before.down_since or monotonic
        return before.evolve(is_up=False, unreachable_reason="Slurm does not know this node", down_since=since)
    is_up = not node.state.lower().startswith(("down", "unknown", "fail"))
    problem = None if is_up else f"Slurm reports {node.state}{f': {node.reason}' if node.reason else ''}"
    down_since = None if is_up else before.down_since or monotonic
    return before.evolve(
        is_up=is_up,
        unreachable_reason=problem,
        down_since=down_since,
        is_reconciled=True,
        daemon_id=_WITNESS,
        has_readings=True,
        read_at=monotonic,
        printed_after=monotonic,
        gpus=tuple(_find_gpus(cluster, before.name, node)),
    )


def _find_gpus(cluster: ClusterSettings, name: str, node: SlurmNode) -> Iterator[GpuReading]:
    """Yield the GPUs in the order in which Slurm counts them: type by type."""
    cards = {cluster.slurm.gpu_type(card.model): card for one in cluster.nodes for card in one.gpus or ()}
    wanted = {cluster.slurm.gpu_type(model): model for profile in cluster.profiles for model in profile.models}
    types = [kind for kind, count in node.gpus.items() for _ in range(count)]
    problems = parse_problems(node)
    for index, kind in enumerate(types):
        card = cards.get(kind)
        yield GpuReading(
            uuid=f"SLURM-{name}-{index}",
            index=index,
            model=gpus.shorten_model(card.model if card is not None else wanted.get(kind, kind or "GPU")),
            memory_mib=0 if card is None else card.memory // _MIB,
            error=problems.get(index),
        )
