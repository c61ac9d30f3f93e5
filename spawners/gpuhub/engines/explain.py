"""Why a request waits, for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from gpuhub.engines.bans import Ban
from gpuhub.engines.base import Request
from gpuhub.engines.candidates import candidate_slots
from gpuhub.engines.feasible import describe
from gpuhub.engines.gangs import describe_models, place
from gpuhub.engines.mirror import Mirror
from gpuhub.engines.order import Group
from gpuhub.engines.stock import AT_ONCE
from gpuhub.engines.walk import Walk

#: So many owners or nodes are named in one line.
_MOST_NAMED = 4


def waits_for(request: Request, group: Group, walk: Walk, mirror: Mirror) -> str:
    """One line: what a request asks for, and what is in the way after this walk."""
    if request.id in walk.grants:
        return f"{describe(request)}: it is its turn"
    limit = walk.rooms.text(request)
    if limit is not None:
        return limit
    if not request.size:
        return _without_gpu(request, mirror)
    mine = candidate_slots(request, mirror.stock)
    if not mine:
        return f"{describe(request)}: no node has such at present"
    if _is_short(request, group, walk, mirror):
        return f"{describe(request)}: {_short(request)}"
    reasons = [
        _given_back(request, walk, mirror),
        _held(mine, walk, mirror),
        _asked_for(request, mine, walk, mirror),
        _reserved(group, mine, walk, mirror),
        _unavailable(mine, mirror),
    ]
    return f"{describe(request)}: {'; '.join(filter(None, reasons)) or _short(request)}"


def _given_back(request: Request, walk: Walk, mirror: Mirror) -> str:
    """Who was asked to give back what the request counts on."""
    plan = walk.plans.get(request.id)
    if plan is None or plan.at > walk.now:
        return ""
    models: dict[str, Counter[str]] = {}
    for name, uuids in plan.slots.items():
        node = mirror.stock.nodes[name]
        for holding_id, use in node.uses.items():
            for position in use.positions:
                slot = node.supply.slots[position]
                if slot.uuid in uuids and use.ends_at == AT_ONCE:
                    owner = mirror.stock.holdings[holding_id].request.owner
                    models.setdefault(owner, Counter())[slot.card.model] += 1
    return ", ".join(f"waits for {owner} to give back {describe_models(counts)}" for owner, counts in models.items())


def _held(mine: Mapping[str, frozenset[str]], walk: Walk, mirror: Mirror) -> str:
    owners = set()
    for name, uuids in mine.items():
        node = mirror.stock.nodes[name]
        for holding_id, use in node.uses.items():
            is_mine = any(node.supply.slots[position].uuid in uuids for position in use.positions)
            if holding_id not in walk.grants and (is_mine or use.is_exclusive):
                owners.add(mirror.stock.holdings[holding_id].request.owner)
    return f"held by {named(owners)}" if owners else ""


def _asked_for(request: Request, mine: Mapping[str, frozenset[str]], walk: Walk, mirror: Mirror) -> str:
    """Whether earlier requests just got what was free, or count on it."""
    taken = any(share.node in mine for grant in walk.grants.values() for share in grant.shares)
    bans = walk.guards.bans(request.time_limit_s, frozenset(each.id for each in mirror.reservations), request.id)
    kept = bans.by_node if bans else {}
    if taken or any(_has_free(mirror, name, mine[name], ban) for name, ban in kept.items() if name in mine):
        return "asked for by others before"
    return ""


def _has_free(mirror: Mirror, name: str, uuids: frozenset[str], ban: Ban) -> bool:
    """Whether something is free on a node that may not be used."""
    node = mirror.stock.nodes[name]
    view = mirror.stock.view(node)
    if view is None:
        return False
    kept = uuids if ban.is_whole else uuids & ban.slots
    state, order = view
    return any(free and node.supply.slots[at].uuid in kept for free, at in zip(state.free, order, strict=True))


def _reserved(group: Group, mine: Mapping[str, frozenset[str]], walk: Walk, mirror: Mirror) -> str:
    """Reservations of others on what the request could use, and until when."""
    uuids = frozenset().union(*mine.values())
    texts = []
    for each in mirror.reservations:
        if each.id not in group.admitted and each.ends_at > walk.now and each.uuids & uuids:
            begins = f"from {moment(each.starts_at)} " if each.starts_at > walk.now else ""
            texts.append(f"reserved {begins}until {moment(each.ends_at)}: {each.name}")
    return "; ".join(texts)


def _unavailable(mine: Mapping[str, frozenset[str]], mirror: Mirror) -> str:
    texts = []
    for name, uuids in sorted(mine.items()):
        supply = mirror.stock.nodes[name].supply
        troubles = [slot.trouble for slot in supply.slots if slot.uuid in uuids and not slot.available]
        if not supply.takes_work:
            troubles = [supply.trouble]
        if troubles:
            known = "; ".join(dict.fromkeys(trouble for trouble in troubles if trouble))
            texts.append(f"{name} ({known})" if known else name)
    more = f" and {len(texts) - _MOST_NAMED} other nodes" if len(texts) > _MOST_NAMED else ""
    return f"not available at present: {', '.join(texts[:_MOST_NAMED])}{more}" if texts else ""


def _without_gpu(request: Request, mirror: Mirror) -> str:
    if not any(node.supply.takes_work for node in mirror.stock.nodes.values()):
        return "no node can be reached at present"
    return f"{describe(request)}: {_short(request)}"


def _is_short(request: Request, group: Group, walk: Walk, mirror: Mirror) -> bool:
    """Whether only CPU or memory is in the way."""
    if not (request.cpu_milli or request.memory_mib):
        return False
    without = replace(request, cpu_milli=0, memory_mib=0)
    bans = walk.guards.bans(request.time_limit_s, group.admitted, request.id)
    return place(without, mirror.fits_of(without), bans, None) is not None


def _short(request: Request) -> str:
    if request.cpu_milli or request.memory_mib:
        return "too little CPU or memory is left on the nodes"
    return "not free yet"


def named(names: Iterable[str]) -> str:
    """Names for a person, the first few of many."""
    ordered = sorted(names)
    if len(ordered) <= _MOST_NAMED:
        return ", ".join(ordered)
    return f"{', '.join(ordered[:_MOST_NAMED])} and {len(ordered) - _MOST_NAMED} others"


def moment(seconds: float) -> str:
    """For a person: `2026-03-01 14:30 UTC`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
