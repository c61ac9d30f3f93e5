"""What is asked of Slurm for a request. Pure.

A job of Slurm's names one type of GPU, or any. Where several models will do, any type is asked for and the nodes that
have others are left out; where that cannot serve, it is the best liked type that can. What can serve at once goes
before what is still held.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpuhub.engines.base import NodeSupply, Request, Slot
from gpuhub.slurm.site import find_partition, find_terms
from gpuhub.slurm.submission import HOLDER
from gpuhub.slurm.table import Slurm
from gpuhub.slurm.values import Node, Site, Submission, Submitter
from gpuhub.tables import Profile

#: Slurm ends a job so much later than gpuhub its lease: it is the net, seconds.
MARGIN_S = 120
#: One point of a request's priority in Slurm's, whose priorities are in the thousands.
NICE_PER_POINT = 100
_MINUTE_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """On which GPUs a request may run, in Slurm's terms."""

    #: None for any.
    gpu_type: str | None = None
    #: Nodes to leave out, by Slurm's names.
    exclude: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """One of our nodes as Slurm has it."""

    name: str
    #: Types of which all cards there will do, and how many there are.
    good: Mapping[str, int]
    #: Other types there; Slurm tells none of a type from the others.
    bad: frozenset[str]
    #: Slurm knows its GPUs by type.
    is_typed: bool


def choose(request: Request, supplies: Mapping[str, NodeSupply], nodes: Sequence[Node], table: Slurm) -> Choice | None:
    """Which type to ask for and which nodes to leave out; `supplies` are our nodes by Slurm's names. None where no node
    that is known so far would do.

    Of several ways one of which enough is free at present goes before one that is liked better. Nodes of Slurm's that
    are not ours are left out: gpuhub can make no containers there.
    """
    kept_out = {node.name for node in nodes if not _may_use(request, supplies.get(node.name))}
    if not request.size:
        return Choice(exclude=frozenset(kept_out))
    offers = [_offer(request, node, supplies[node.name], table) for node in nodes if node.name not in kept_out]
    slots = [slot for one in supplies.values() for slot in one.slots]
    found = _ways(request, offers, table, slots) if offers else ()
    ways = [Choice(gpu_type=way.gpu_type, exclude=way.exclude | kept_out) for way in found]
    able = [way for way in ways if _serves(request, offers, way)]
    return next((way for way in able if is_free(request, way, nodes)), next(iter(able or ways), None))


def is_free(request: Request, choice: Choice, nodes: Iterable[Node]) -> bool:
    """Whether all that is asked for is free, as Slurm says; those who wait may still get it."""
    free = [_count_free(node, choice.gpu_type) for node in nodes if _is_open(request, choice, node)]
    return _is_enough(request, free)


def build_submission(
    request: Request,
    choice: Choice,
    *,
    name: str,
    submitter: Submitter,
    table: Slurm,
    profile: Profile | None = None,
    site: Site | None = None,
) -> Submission:
    """The holder job of a request. `profile` is a notebook's; `site` tells the partitions' limits."""
    terms = find_terms(table, profile)
    return Submission(
        name=name,
        submitter=submitter,
        script=HOLDER,
        nodes=request.nodes,
        least_nodes=request.least_nodes,
        gpus_per_node=0 if request.spread is not None else request.gpus_per_node,
        gpu_type=choice.gpu_type,
        spread=request.spread,
        cpus=max(1, math.ceil(request.cpu_milli / 1000)),
        memory_mib=request.memory_mib,
        time_limit_s=None if request.time_limit_s is None else _limit(request.time_limit_s, site, terms.partition),
        partition=terms.partition,
        account=terms.account,
        qos=terms.qos,
        reservation=terms.reservation,
        exclude=tuple(sorted(choice.exclude)),
        exclusive=request.exclusive,
        nice=-NICE_PER_POINT * request.priority,
        survives_nodes=request.least_nodes < request.nodes,
    )


def limit_for(seconds: float) -> int:
    """Slurm's limit for what is to last so long: a little more, in whole minutes."""
    return _whole_minutes(seconds + MARGIN_S)


def _limit(seconds: float, site: Site | None, partition: str | None) -> int:
    """Beyond its partition's limit a job would wait for ever: there the lease's end and the job's may be one."""
    found = None if site is None else find_partition(site, partition)
    longest = None if found is None else found.longest_s
    limit = limit_for(seconds)
    return limit if longest is None else min(limit, max(longest, _whole_minutes(seconds)))


def _whole_minutes(seconds: float) -> int:
    return math.ceil(seconds / _MINUTE_S) * _MINUTE_S


def _may_use(request: Request, supply: NodeSupply | None) -> bool:
    if supply is None or supply.name in request.exclude:
        return False
    return not request.size or request.requirement.accepts_driver(supply.driver)


def _offer(request: Request, node: Node, supply: NodeSupply, table: Slurm) -> _Offer:
    good: dict[str, int] = {}
    bad: set[str] = set()
    for slot in supply.slots:
        kind = table.gpu_type(slot.card.model)
        if request.requirement.accepts(slot.card):
            good[kind] = good.get(kind, 0) + 1
        else:
            bad.add(kind)
    return _Offer(
        name=node.name,
        good={kind: count for kind, count in good.items() if kind not in bad},
        bad=frozenset(bad),
        is_typed=any(node.gpus),
    )


def _ways(request: Request, offers: Sequence[_Offer], table: Slurm, slots: Iterable[Slot]) -> Iterable[Choice]:
    """Ways to ask for it, the best one first."""
    kinds = sorted({kind for offer in offers for kind in offer.good})
    if not kinds:
        # Nothing is known of these cards yet; Slurm knows its types.
        wanted = request.requirement
        if wanted.models:
            yield Choice(gpu_type=table.gpu_type(wanted.models[0]))
        elif not wanted.least_memory_mib and wanted.least_capability is None and not request.same_model:
            yield Choice()
        return
    mixed = frozenset(offer.name for offer in offers if offer.bad)
    is_any = not mixed and not request.requirement.models
    if not request.same_model and (len(kinds) > 1 or is_any):
        yield Choice(exclude=mixed)
    liking = _liking(request, table, slots)
    for kind in sorted(kinds, key=lambda one: (liking.get(one, len(liking)), one)):
        if all(offer.is_typed for offer in offers if kind in offer.good):
            yield Choice(gpu_type=kind, exclude=frozenset(offer.name for offer in offers if kind in offer.bad))
        else:
            yield Choice(exclude=frozenset(offer.name for offer in offers if offer.bad or set(offer.good) - {kind}))


def _liking(request: Request, table: Slurm, slots: Iterable[Slot]) -> dict[str, int]:
    """Types by how well they are liked, 0 for best."""
    places: dict[str, int] = {}
    for slot in slots:
        place = request.requirement.liking(slot.card)
        if place is not None:
            kind = table.gpu_type(slot.card.model)
            places[kind] = min(place, places.get(kind, place))
    return places


def _serves(request: Request, offers: Iterable[_Offer], way: Choice) -> bool:
    """Whether there is enough of it, free or not."""
    counts = [
        sum(offer.good.values()) if way.gpu_type is None else offer.good.get(way.gpu_type, 0)
        for offer in offers
        if offer.name not in way.exclude
    ]
    return _is_enough(request, counts)


def _is_enough(request: Request, counts: Collection[int]) -> bool:
    """Whether so many GPUs on so many nodes will do."""
    if request.spread is not None:
        return sum(counts) >= request.spread
    return sum(count >= request.gpus_per_node for count in counts) >= request.least_nodes


def _is_open(request: Request, choice: Choice, node: Node) -> bool:
    is_taken = request.exclusive and any(node.used.values())
    return node.takes_work and node.name not in choice.exclude and not is_taken


def _count_free(node: Node, gpu_type: str | None) -> int:
    kinds = node.gpus if gpu_type is None else [gpu_type]
    return sum(max(0, node.gpus.get(kind, 0) - node.used.get(kind, 0)) for kind in kinds)
