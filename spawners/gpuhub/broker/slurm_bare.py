"""Nodes without Docker: what there is, and that something is over, is Slurm's word alone.

The job itself is what runs there. Its GPUs have no UUIDs that anybody could ask for, so they get some that say where
they are; and that a lease's GPUs are free is proven by the end of its job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gpuhub import gpus, names
from gpuhub.broker import leases as rules
from gpuhub.broker.core import Core
from gpuhub.broker.rows import LeaseRow
from gpuhub.containers.workers import WorkerSpec
from gpuhub.errors import Conflict
from gpuhub.nodes.records import GpuReading, NodeRecord
from gpuhub.settings import Cluster
from gpuhub.slurm.values import LIVE, Job, Look, Node, State

#: In place of a Docker daemon's id.
_WITNESS = "slurm"
_MIB = 1024**2


class BareNodes:
    """Follows Slurm's nodes and jobs where no daemon can be asked."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def follow(self, look: Look) -> None:
        """Bring nodes and ending leases into agreement with a look."""
        core = self._core
        theirs = {node.name: node for node in look.nodes}
        for node in core.cluster.nodes:
            before = core.inventory.nodes[node.name]
            seen = build_record(core.cluster, before, theirs.get(node.slurm_name), core.clock.monotonic())
            await core.observe(seen)
            if seen.is_known and [gpu.card for gpu in seen.gpus] != [gpu.card for gpu in before.gpus]:
                await core.remember_gpus(seen)
        gone: defaultdict[str, list[str]] = defaultdict(list)
        alive = {job.id for job in look.jobs if is_there(job)}
        for lease in core.ledger.snapshot.leases.values():
            for name in find_clear(lease, alive):
                gone[name].append(lease.id)
        for name, lease_ids in gone.items():
            await core.prove_gone(lease_ids, name)


async def take_worker(spec: WorkerSpec) -> str:
    """What stands for the container of a worker: nothing is started, since the job that was granted runs it.

    Raises:
        Conflict: the lease has no job.
    """
    if spec.slurm_job is None:
        raise Conflict(f"lease {spec.lease_id} has no Slurm job that could run its workers")
    return names.slurm_stand_in(spec.slurm_job)


def is_there(job: Job) -> bool:
    """Whether anything of a job may be on its nodes."""
    return job.state in LIVE or job.state is State.COMPLETING or job.is_completing


def find_clear(lease: LeaseRow, alive: set[int]) -> tuple[str, ...]:
    """Nodes that are clear of an ending lease: all, once its job has ended there. Pure.

    What an elastic job gives back while it goes on is not clear before all of it is.
    """
    if lease.state not in rules.ENDING or lease.slurm_job in alive:
        return ()
    return rules.unproven_nodes(lease)


def build_record(cluster: Cluster, before: NodeRecord, node: Node | None, monotonic: float) -> NodeRecord:
    """A node as Slurm tells of it; None where Slurm does not know it. Pure."""
    if node is None:
        since = before.down_since or monotonic
        return before.evolve(is_up=False, trouble="Slurm does not know this node", down_since=since)
    is_up = not node.state.lower().startswith(("down", "unknown", "fail"))
    trouble = None if is_up else f"Slurm says {node.state}{f': {node.reason}' if node.reason else ''}"
    down_since = None if is_up else before.down_since or monotonic
    return before.evolve(
        is_up=is_up,
        trouble=trouble,
        down_since=down_since,
        is_settled=True,
        daemon_id=_WITNESS,
        is_known=True,
        read_at=monotonic,
        printed_after=monotonic,
        gpus=tuple(_find_gpus(cluster, before.name, node)),
    )


def _find_gpus(cluster: Cluster, name: str, node: Node) -> Iterator[GpuReading]:
    """In the order in which Slurm counts them: type by type."""
    cards = {cluster.slurm.gpu_type(card.model): card for one in cluster.nodes for card in one.gpus or ()}
    wanted = {cluster.slurm.gpu_type(model): model for profile in cluster.profiles for model in profile.models}
    types = [kind for kind, count in node.gpus.items() for _ in range(count)]
    for index, kind in enumerate(types):
        card = cards.get(kind)
        yield GpuReading(
            uuid=f"SLURM-{name}-{index}",
            index=index,
            model=gpus.short_model(card.model if card is not None else wanted.get(kind, kind or "GPU")),
            memory_mib=0 if card is None else card.memory // _MIB,
        )
