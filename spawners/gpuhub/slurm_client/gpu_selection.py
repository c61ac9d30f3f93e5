"""Chooses the GPU type and nodes of a request's Slurm job, and builds its submission.

A Slurm job names one type of GPU, or any. If several models suit, any type is requested and the nodes with unsuitable
GPUs are excluded; if that is impossible, the most preferred type is requested. A selection that is available now comes
before one that is held.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpuhub.config.containers.profiles import ProfileSettings
from gpuhub.config.slurm import SlurmSettings
from gpuhub.scheduler.interface import GpuSlot, NodeCapacity, SchedulingRequest
from gpuhub.slurm_client.models import SlurmNode, SlurmSite, SlurmSubmission, Submitter
from gpuhub.slurm_client.site import find_partition, find_terms
from gpuhub.slurm_client.submission import HOLDER_SCRIPT

#: Time by which Slurm's limit is later than the lease's end, seconds: it is only a safety net.
TIME_LIMIT_MARGIN_S = 120
#: Slurm's nice value for one point of a request's priority; Slurm's priorities are in the thousands.
NICE_PER_POINT = 100
_MINUTE_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSelection:
    """The GPUs on which a request may run, in Slurm's terms."""

    #: Slurm's GPU type; None for any.
    gpu_type: str | None = None
    #: Excluded nodes, by Slurm's names.
    exclude: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeOffer:
    """GPUs of one node, by Slurm's types."""

    name: str
    #: Numbers of GPUs by type, for types whose GPUs on the node all suit the request.
    suitable: Mapping[str, int]
    #: Other types on the node; Slurm cannot distinguish GPUs of one type.
    unsuitable: frozenset[str]
    #: Whether Slurm knows the types of its GPUs.
    is_typed: bool


def select_gpus(
    request: SchedulingRequest, supplies: Mapping[str, NodeCapacity], nodes: Sequence[SlurmNode], table: SlurmSettings
) -> GpuSelection | None:
    """Choose GPU type and excluded nodes, or return None if no known node suits the request.

    A selection that is available now comes before a preferred one. Slurm nodes that are not gpuhub's are excluded,
    because gpuhub cannot create containers there.

    Args:
        supplies: gpuhub's nodes by Slurm's names.
    """
    excluded = {node.name for node in nodes if not _is_usable(request, supplies.get(node.name))}
    if not request.size:
        return GpuSelection(exclude=frozenset(excluded))
    offers = [_build_offer(request, node, supplies[node.name], table) for node in nodes if node.name not in excluded]
    slots = [slot for node in supplies.values() for slot in node.slots]
    candidates = _list_selections(request, offers, table, slots) if offers else ()
    selections = [
        GpuSelection(gpu_type=selection.gpu_type, exclude=selection.exclude | excluded) for selection in candidates
    ]
    possible = [selection for selection in selections if _can_serve(request, offers, selection)]
    return next(
        (selection for selection in possible if is_available_now(request, selection, nodes)),
        next(iter(possible or selections), None),
    )


def is_available_now(request: SchedulingRequest, choice: GpuSelection, nodes: Iterable[SlurmNode]) -> bool:
    """Return whether Slurm reports enough free GPUs; other waiting jobs may still get them."""
    free = [_count_free(node, choice.gpu_type) for node in nodes if _is_open(request, choice, node)]
    return _is_enough(request, free)


def build_submission(
    request: SchedulingRequest,
    choice: GpuSelection,
    *,
    name: str,
    submitter: Submitter,
    table: SlurmSettings,
    profile: ProfileSettings | None = None,
    site: SlurmSite | None = None,
) -> SlurmSubmission:
    """Build the holder job of a request.

    Args:
        profile: Profile of a notebook.
        site: Used for the partitions' limits.
    """
    terms = find_terms(table, profile)
    return SlurmSubmission(
        name=name,
        submitter=submitter,
        script=HOLDER_SCRIPT,
        nodes=request.nodes,
        min_nodes=request.least_nodes,
        gpus_per_node=0 if request.spread is not None else request.gpus_per_node,
        gpu_type=choice.gpu_type,
        spread=request.spread,
        cpus=count_cpus(request),
        memory_mib=request.memory_mib,
        time_limit_s=None
        if request.time_limit_s is None
        else _build_partition_limit(request.time_limit_s, site, terms.partition),
        partition=terms.partition,
        account=terms.account,
        qos=terms.qos,
        reservation=terms.reservation,
        exclude=tuple(sorted(choice.exclude)),
        exclusive=request.exclusive,
        nice=-NICE_PER_POINT * request.priority,
        survives_nodes=request.least_nodes < request.nodes,
    )


def count_cpus(request: SchedulingRequest) -> int:
    """Return the CPUs that a request's job has on each of its nodes at the least."""
    return max(1, math.ceil(request.cpu_milli / 1000))


def build_time_limit(seconds: float) -> int:
    """Return Slurm's time limit, seconds, for a lease of `seconds`: with a margin, in whole minutes."""
    return _whole_minutes(seconds + TIME_LIMIT_MARGIN_S)


def _build_partition_limit(seconds: float, site: SlurmSite | None, partition: str | None) -> int:
    """Return the time limit within the partition's, beyond which a job would wait forever; the margin may be lost."""
    partition_settings = None if site is None else find_partition(site, partition)
    max_time_s = None if partition_settings is None else partition_settings.max_time_s
    limit = build_time_limit(seconds)
    return limit if max_time_s is None else min(limit, max(max_time_s, _whole_minutes(seconds)))


def _whole_minutes(seconds: float) -> int:
    return math.ceil(seconds / _MINUTE_S) * _MINUTE_S


def _is_usable(request: SchedulingRequest, supply: NodeCapacity | None) -> bool:
    if supply is None or supply.name in request.exclude:
        return False
    return not request.size or request.requirement.accepts_driver(supply.driver)


def _build_offer(request: SchedulingRequest, node: SlurmNode, supply: NodeCapacity, table: SlurmSettings) -> _NodeOffer:
    good: dict[str, int] = {}
    bad: set[str] = set()
    for slot in supply.slots:
        kind = table.gpu_type(slot.card.model)
        if request.requirement.accepts(slot.card):
            good[kind] = good.get(kind, 0) + 1
        else:
            bad.add(kind)
    return _NodeOffer(
        name=node.name,
        suitable={kind: count for kind, count in good.items() if kind not in bad},
        unsuitable=frozenset(bad),
        is_typed=any(node.gpus),
    )


def _list_selections(
    request: SchedulingRequest, offers: Sequence[_NodeOffer], table: SlurmSettings, slots: Iterable[GpuSlot]
) -> Iterable[GpuSelection]:
    """Yield the possible selections, the best one first."""
    kinds = sorted({kind for offer in offers for kind in offer.suitable})
    if not kinds:
        # The nodes' cards are unknown so far, but Slurm knows its types.
        wanted = request.requirement
        if wanted.models:
            yield GpuSelection(gpu_type=table.gpu_type(wanted.models[0]))
        elif not wanted.least_memory_mib and wanted.least_capability is None and not request.same_model:
            yield GpuSelection()
        return
    mixed = frozenset(offer.name for offer in offers if offer.unsuitable)
    is_any = not mixed and not request.requirement.models
    if not request.same_model and (len(kinds) > 1 or is_any):
        yield GpuSelection(exclude=mixed)
    ranks = _rank_types(request, table, slots)
    for kind in sorted(kinds, key=lambda name: (ranks.get(name, len(ranks)), name)):
        if all(offer.is_typed for offer in offers if kind in offer.suitable):
            yield GpuSelection(
                gpu_type=kind, exclude=frozenset(offer.name for offer in offers if kind in offer.unsuitable)
            )
        else:
            yield GpuSelection(
                exclude=frozenset(offer.name for offer in offers if offer.unsuitable or set(offer.suitable) - {kind})
            )


def _rank_types(request: SchedulingRequest, table: SlurmSettings, slots: Iterable[GpuSlot]) -> dict[str, int]:
    """Return the types' ranks by preference, 0 for the best."""
    ranks: dict[str, int] = {}
    for slot in slots:
        rank = request.requirement.preference_rank(slot.card)
        if rank is not None:
            kind = table.gpu_type(slot.card.model)
            ranks[kind] = min(rank, ranks.get(kind, rank))
    return ranks


def _can_serve(request: SchedulingRequest, offers: Iterable[_NodeOffer], selection: GpuSelection) -> bool:
    """Return whether the nodes have enough of these GPUs, free or not."""
    counts = [
        sum(offer.suitable.values()) if selection.gpu_type is None else offer.suitable.get(selection.gpu_type, 0)
        for offer in offers
        if offer.name not in selection.exclude
    ]
    return _is_enough(request, counts)


def _is_enough(request: SchedulingRequest, counts: Collection[int]) -> bool:
    """Return whether these numbers of GPUs per node suffice."""
    if request.spread is not None:
        return sum(counts) >= request.spread
    return sum(count >= request.gpus_per_node for count in counts) >= request.least_nodes


def _is_open(request: SchedulingRequest, choice: GpuSelection, node: SlurmNode) -> bool:
    is_taken = request.exclusive and any(node.used.values())
    return node.takes_work and node.name not in choice.exclude and not is_taken


def _count_free(node: SlurmNode, gpu_type: str | None) -> int:
    kinds = node.gpus if gpu_type is None else [gpu_type]
    return sum(max(0, node.gpus.get(kind, 0) - node.used.get(kind, 0)) for kind in kinds)
