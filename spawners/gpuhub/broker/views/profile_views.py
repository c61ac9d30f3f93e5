"""The views of profiles: their free GPUs and holders, and the requests that wait for the same GPUs."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import inf

from gpuhub.broker.views.gpu_summary import ClusterViewInput, GpuSummary
from gpuhub.broker.views.profile_sizes import find_profile_sizes
from gpuhub.broker_api.schemas import HolderView, ProfileView
from gpuhub.common.gpu import GpuRequirement
from gpuhub.config.containers.container_size import build_profile_size
from gpuhub.config.containers.profiles import gpu_requirement
from gpuhub.config.settings import ProfileSettings
from gpuhub.domain.models import LeaseRow
from gpuhub.domain.scheduler_input import build_request
from gpuhub.scheduler.interface import Scheduler, SchedulingRequest

#: Maximum number of holders that are named for a profile: those whose time ends first.
MAX_HOLDERS_SHOWN = 8
#: Maximum number of owners that are named for a node.
MAX_OWNERS_SHOWN = 2


def count_demand(
    scheduler: Scheduler, waiting: Sequence[LeaseRow], gpus: GpuSummary
) -> list[tuple[frozenset[str], Counter[str]]]:
    """Return the GPUs that meet each requirement in the queue, and the number of requests with it by owner."""
    kinds: defaultdict[tuple[GpuRequirement, frozenset[str]], Counter[str]] = defaultdict(Counter)
    for lease in waiting:
        if lease.resources.size:
            kinds[lease.resources.requirement, gpus.node_groups & build_request(lease).groups][lease.owner] += 1
    return [
        (_find_serving(scheduler, SchedulingRequest(id="", owner="", requirement=kind, groups=groups), gpus)[0], owners)
        for (kind, groups), owners in kinds.items()
    ]


def list_waiting_owners(
    inputs: ClusterViewInput, waiting: Sequence[LeaseRow], demand: Sequence[tuple[frozenset[str], Counter[str]]]
) -> Mapping[str, tuple[str, ...]]:
    """Return by node whose requests could be granted there; those without a GPU could be on any node."""
    anywhere = {lease.owner for lease in waiting if not lease.resources.size}
    shown: dict[str, tuple[str, ...]] = {}
    for name, record in inputs.inventory.nodes.items():
        uuids = {gpu.uuid for gpu in record.gpus}
        # A request for one of its GPUs may wait for the CPU or memory of those who have another.
        owners = anywhere.union(*(owners for candidates, owners in demand if not uuids.isdisjoint(candidates)))
        shown[name] = tuple(heapq.nsmallest(MAX_OWNERS_SHOWN, owners))
    return shown


def _find_serving(
    scheduler: Scheduler, request: SchedulingRequest, gpus: GpuSummary
) -> tuple[frozenset[str], tuple[HolderView, ...]]:
    """Return the GPUs that can serve a request, and their holders; computed once for equal requirements."""
    if not request.size:
        return frozenset(), ()
    key = (request.requirement, request.share, request.groups & gpus.node_groups)
    if key not in gpus.serving:
        serving = scheduler.find_candidates(request)
        gpus.serving[key] = serving, _find_holders(serving, gpus)
    return gpus.serving[key]


def build_profile(
    inputs: ClusterViewInput,
    profile: ProfileSettings,
    gpus: GpuSummary,
    demand: Sequence[tuple[frozenset[str], Counter[str]]],
) -> ProfileView:
    """Return the view of a profile; `demand` is that of the requests in the queue."""
    size = build_profile_size(profile, follows_gpus=inputs.cluster.counts_machines)
    request = SchedulingRequest(
        id="",
        owner=inputs.owner,
        groups=inputs.groups,
        created_at=inputs.now,
        gpus_per_node=profile.gpu_count,
        requirement=gpu_requirement(profile),
        share=profile.gpu_share,
        exclusive=profile.exclusive,
        time_limit_s=profile.time_limit,
        cpu_milli=size.cpu_milli,
        memory_mib=size.memory_mib,
        cpu_by_gpu=size.cpu_by_gpu,
        memory_by_gpu=size.memory_by_gpu,
    )
    serving, holders = _find_serving(inputs.scheduler, request, gpus)
    starts_now = inputs.scheduler.can_start_now(request, inputs.now)
    # A free GPU that would not be granted at once is claimed by an earlier request, or reserved.
    cpus, memory_mib = find_profile_sizes(profile, inputs.inventory, serving)
    free = 0 if profile.gpu_count == 1 and not starts_now else _count_free(profile.gpu_share, serving, gpus)
    return ProfileView(
        name=profile.name,
        title=profile.title,
        description=profile.description,
        gpu_count=profile.gpu_count,
        total=len(serving) * profile.gpu_share,
        free=free,
        starts_now=starts_now,
        ahead=0 if starts_now else sum(owners.total() for candidates, owners in demand if candidates & serving),
        holders=holders,
        share=profile.gpu_share,
        models=profile.models,
        image=profile.image,
        images=profile.offered_images,
        cpus=cpus,
        memory_mib=memory_mib,
    )


def _count_free(share: int, serving: frozenset[str], gpus: GpuSummary) -> int:
    """Return the number of free GPUs, or of free GPU shares."""
    unused = len(gpus.free & serving) * share
    if share == 1:
        return unused
    shared = [uuid for uuid in serving & gpus.shares.keys() if gpus.shares[uuid] == share]
    return unused + sum(share - len(gpus.held[uuid]) for uuid in shared)


def _find_holders(serving: frozenset[str], gpus: GpuSummary) -> tuple[HolderView, ...]:
    leases = {lease.id: lease for uuid in serving & gpus.held.keys() for lease in gpus.held[uuid]}
    jobs = {holder.slurm_job: holder for uuid in serving & gpus.outside.keys() for holder in (gpus.outside[uuid],)}
    holders = [gpus.holders[lease_id] for lease_id in sorted(leases)] + list(jobs.values())
    return tuple(heapq.nsmallest(MAX_HOLDERS_SHOWN, holders, key=_end_of))


def _end_of(holder: HolderView) -> tuple[float, float]:
    return (inf if holder.until is None else holder.until.timestamp(), holder.since.timestamp())
