"""What the views of nodes and profiles are built from, and a summary of who has which GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuhub.backends.interface import ExternalJob, ExternalUsage
from gpuhub.broker.views import serializers
from gpuhub.broker.views.serializers import QueuePlace
from gpuhub.broker_api.schemas import (
    Capabilities,
    HolderView,
    LeaseState,
    NodeView,
    PartitionView,
    Purpose,
    ReservationView,
)
from gpuhub.broker_api.schemas.bench import NodeBenchView
from gpuhub.common.gpu import GpuRequirement
from gpuhub.config.settings import ClusterSettings
from gpuhub.domain import reservations
from gpuhub.domain.models import LeaseRow
from gpuhub.nodes.inventory import Inventory
from gpuhub.nodes.status import Cordon, GpuLeaseStatus
from gpuhub.scheduler.interface import CircuitUsage, Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterViewInput:
    """The values that the view of the cluster is built from. `now` is in seconds since 1970."""

    cluster: ClusterSettings
    #: Open leases by id.
    leases: Mapping[str, LeaseRow]
    #: Places of waiting requests by lease, each computed on access.
    places: Mapping[str, QueuePlace]
    inventory: Inventory
    scheduler: Scheduler
    now: float
    monotonic: float
    cordons: Mapping[str, Cordon] = field(default_factory=dict)
    lease_statuses: Mapping[str, GpuLeaseStatus] = field(default_factory=dict)
    reservations: Sequence[ReservationView] = ()
    #: Jobs from outside gpuhub on the same GPUs, and the capabilities of the backend.
    external: ExternalUsage = field(default_factory=ExternalUsage)
    capabilities: Capabilities = field(default_factory=Capabilities)
    #: Builds the partitions that users may choose, from the nodes.
    build_partitions: Callable[[Sequence[NodeView]], tuple[PartitionView, ...]] = lambda _: ()
    #: Names of jobs by lease, if they have one.
    job_names: Mapping[str, str] = field(default_factory=dict)
    #: Since when notebooks are idle while others wait, by lease.
    idle_times: Mapping[str, float] = field(default_factory=dict)
    #: What `gpuhub bench` last found, by node.
    bench: Mapping[str, NodeBenchView] = field(default_factory=dict)
    #: The caller, whose groups, reservations and limits decide what starts at once; empty for a view for all users.
    owner: str = ""
    groups: frozenset[str] = frozenset()


@dataclass(slots=True)
class GpuSummary:
    """Leases, reservations and holders of the cluster's GPUs, by UUID."""

    held: Mapping[str, Sequence[LeaseRow]]
    #: Number of shares of GPUs that are shared now.
    shares: Mapping[str, int]
    quarantined: frozenset[str]
    reserved: Mapping[str, str]
    #: Holders by lease.
    holders: Mapping[str, HolderView]
    #: Holders from outside gpuhub, by UUID.
    outside: Mapping[str, HolderView]
    free: set[str] = field(default_factory=set)
    #: Candidates and their holders, by requirement, share and those of the owner's groups that nodes are restricted to.
    serving: dict[tuple[GpuRequirement, int, frozenset[str]], tuple[frozenset[str], tuple[HolderView, ...]]] = field(
        default_factory=dict
    )
    #: How much of each enforced circuit is taken, by its name.
    circuits: Mapping[str, CircuitUsage] = field(default_factory=dict)
    #: The groups that some node is restricted to.
    node_groups: frozenset[str] = frozenset()


def summarise_gpus(inputs: ClusterViewInput) -> GpuSummary:
    """Return who has, and who has reserved, which GPU."""
    held: defaultdict[str, list[LeaseRow]] = defaultdict(list)
    shares: dict[str, int] = {}
    quarantined: set[str] = set()
    for lease in inputs.leases.values():
        for gpu in lease.gpus:
            if gpu.released_at is None:
                held[gpu.uuid].append(lease)
                if gpu.share > 1:
                    shares[gpu.uuid] = gpu.share
                if lease.state is LeaseState.QUARANTINED:
                    quarantined.add(gpu.uuid)
    return GpuSummary(
        held=held,
        shares=shares,
        quarantined=frozenset(quarantined),
        reserved=reservations.find_reserved(inputs.reservations, inputs.inventory, inputs.now),
        holders={
            lease.id: serializers.build_holder(
                lease, inputs.job_names.get(lease.id, ""), inputs.idle_times.get(lease.id)
            )
            for leases in held.values()
            for lease in leases
        },
        outside={uuid: _build_external_holder(job, inputs.now) for uuid, job in inputs.external.gpus.items()},
        circuits=inputs.scheduler.report_circuits(),
        node_groups=inputs.cluster.node_groups,
    )


def _build_external_holder(job: ExternalJob, now: float) -> HolderView:
    return HolderView(
        owner=job.owner,
        purpose=Purpose.JOB,
        since=serializers.to_datetime(now if job.started_at is None else job.started_at),
        until=serializers.to_optional_datetime(job.ends_at),
        slurm_job=job.id,
        is_outside=True,
    )
