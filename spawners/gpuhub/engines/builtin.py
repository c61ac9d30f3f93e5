"""The embedded engine: first come, first served, exact, with best fit. Pure.

In the queue's order, a request that cannot be granted claims every GPU it could ever use, so a later one takes only
what no earlier waiter could use. A request that waits for its owner's own limit claims nothing: it waits for that
owner, and delays nobody else.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set

from gpuhub import gpus
from gpuhub.engines.base import Decision, Request, Share, Slot, Supply, Wait
from gpuhub.gpus import Card

_NOTHING: frozenset[str] = frozenset()


class BuiltinEngine:
    """The functions of this module as an `Engine`."""

    def decide(self, queue: Sequence[Request], supply: Supply) -> Decision:
        """See `decide`."""
        return decide(queue, supply)

    def candidates(self, request: Request, slots: Sequence[Slot]) -> frozenset[str]:
        """See `candidates`."""
        return candidates(request, slots)

    def infeasible(self, request: Request, cards: Mapping[str, Sequence[Card] | None]) -> str | None:
        """See `infeasible`."""
        return infeasible(request, cards)


def decide(queue: Sequence[Request], supply: Supply) -> Decision:
    """Grant what can be granted; `queue` is in the order in which the requests came."""
    grants: dict[str, tuple[Share, ...]] = {}
    waits: dict[str, Wait] = {}
    taken: set[str] = set(supply.held)
    claimed: set[str] = set()
    notebooks = dict(supply.notebooks)
    holds = Counter(supply.held.values())
    for request in queue:
        limit = _over_limit(request, holds[request.owner], supply.max_gpus)
        if limit is not None:
            waits[request.id] = Wait(text=limit, claims=_NOTHING)
            continue
        shares = place(request, supply.slots, taken | claimed, notebooks)
        if shares is None:
            wait = _wait(request, supply, taken, claimed)
            claimed |= wait.claims
            waits[request.id] = wait
            continue
        grants[request.id] = shares
        holds[request.owner] += request.size
        for share in shares:
            taken.update(slot.uuid for slot in share.slots)
            notebooks[share.node] = notebooks.get(share.node, 0) + 1
    return Decision(grants=grants, waits=waits)


def candidates(request: Request, slots: Sequence[Slot]) -> frozenset[str]:
    """Every GPU the request could ever use: good enough, on a node that has enough of such."""
    return frozenset(
        slot.uuid
        for on_node in _suitable(request, slots).values()
        if len(on_node) >= request.gpus_per_node
        for slot in on_node
    )


def place(
    request: Request, slots: Sequence[Slot], blocked: Set[str], notebooks: Mapping[str, int]
) -> tuple[Share, ...] | None:
    """Where the request goes when the `blocked` GPUs may not be used; None when it does not fit."""
    if request.gpus_per_node == 0:
        return _least_busy(request, notebooks)
    free = {
        node: [slot for slot in on_node if slot.available and slot.uuid not in blocked]
        for node, on_node in _suitable(request, slots).items()
        if node in notebooks
    }
    free = {node: on_node for node, on_node in free.items() if len(on_node) >= request.gpus_per_node}
    if len(free) < request.nodes:
        return None
    return _equal_cards(request, free, notebooks) or _least_cards(request, free, notebooks)


def infeasible(request: Request, cards: Mapping[str, Sequence[Card] | None]) -> str | None:
    """Why the request can never be granted, with what there is; None when it can, or may."""
    there_is = "there is: " + gpus.describe_nodes({node: on_node or () for node, on_node in cards.items()})
    unknown = sorted(request.exclude - set(cards))
    if unknown:
        return f"no node {unknown[0]!r} to leave out; {there_is}"
    usable = {node: on_node for node, on_node in cards.items() if node not in request.exclude}
    beside = f" besides {', '.join(sorted(request.exclude))}" if request.exclude else ""
    if len(usable) < request.nodes:
        return (
            f"{request.nodes} nodes were asked for and the cluster has {len(usable)}{beside}: "
            f"{', '.join(usable) or 'none'}"
        )
    able = [node for node, on_node in usable.items() if on_node is None or _enough(request, on_node)]
    if len(able) >= request.nodes:
        return None
    asked = f"{gpus.describe(request.gpus_per_node, request.requirement)} on "
    asked += "one node" if request.nodes == 1 else f"each of {request.nodes} nodes"
    return f"{asked} was asked for, which {len(able) or 'no'} of the nodes{beside} can give; {there_is}"


def _enough(request: Request, cards: Iterable[Card]) -> bool:
    return sum(request.requirement.accepts(card) for card in cards) >= request.gpus_per_node


def _over_limit(request: Request, holds: int, max_gpus: int | None) -> str | None:
    if max_gpus is None or not request.size or holds + request.size <= max_gpus:
        return None
    return f"{request.owner} holds {holds} of at most {max_gpus} GPUs and asks for {request.size} more"


def _suitable(request: Request, slots: Sequence[Slot]) -> dict[str, list[Slot]]:
    found: defaultdict[str, list[Slot]] = defaultdict(list)
    for slot in slots:
        if slot.node not in request.exclude and request.requirement.accepts(slot.card):
            found[slot.node].append(slot)
    return found


def _least_busy(request: Request, notebooks: Mapping[str, int]) -> tuple[Share, ...] | None:
    nodes = sorted((node for node in notebooks if node not in request.exclude), key=lambda node: notebooks[node])
    if len(nodes) < request.nodes:
        return None
    return tuple(Share(node=node, slots=()) for node in nodes[: request.nodes])


def _capability(slot: Slot) -> tuple[int, str, int]:
    return slot.card.memory_mib, slot.card.model, slot.index


def _equal_cards(
    request: Request, free: Mapping[str, Sequence[Slot]], notebooks: Mapping[str, int]
) -> tuple[Share, ...] | None:
    """All GPUs of one kind, the least capable kind of which there are enough; None when no kind suffices."""
    kinds = {slot.card for on_node in free.values() for slot in on_node}
    for kind in sorted(kinds, key=lambda card: (card.memory_mib, card.model)):
        of_kind = {node: [slot for slot in on_node if slot.card == kind] for node, on_node in free.items()}
        of_kind = {node: on_node for node, on_node in of_kind.items() if len(on_node) >= request.gpus_per_node}
        if len(of_kind) >= request.nodes:
            return _least_cards(request, of_kind, notebooks)
    return None


def _least_cards(
    request: Request, free: Mapping[str, Sequence[Slot]], notebooks: Mapping[str, int]
) -> tuple[Share, ...]:
    """The least capable cards; among equals those of the fullest node, so that empty nodes stay whole."""
    picks = {node: sorted(on_node, key=_capability)[: request.gpus_per_node] for node, on_node in free.items()}

    def fitness(node: str) -> tuple[list[tuple[int, str]], int, int]:
        cards = [(slot.card.memory_mib, slot.card.model) for slot in picks[node]]
        return sorted(cards, reverse=True), len(free[node]), notebooks[node]

    chosen = sorted(picks, key=fitness)[: request.nodes]
    return tuple(Share(node=node, slots=tuple(picks[node])) for node in chosen)


def _wait(request: Request, supply: Supply, taken: Set[str], claimed: Set[str]) -> Wait:
    if request.gpus_per_node == 0:
        return Wait(text="no node can be reached at present", claims=_NOTHING)
    mine = candidates(request, supply.slots)
    asked = gpus.describe(request.gpus_per_node, request.requirement)
    if request.nodes > 1:
        asked += f" on each of {request.nodes} nodes"
    reasons = []
    owners = sorted({supply.held[uuid] for uuid in mine if uuid in supply.held})
    if owners:
        reasons.append(f"held by {', '.join(owners)}")
    if mine & claimed or (mine & taken) - set(supply.held):
        reasons.append("asked for by others before")
    if any(slot.uuid in mine and not slot.available for slot in supply.slots):
        reasons.append("not available at present: " + ", ".join(_unavailable_nodes(mine, supply)))
    return Wait(text=f"{asked}: {'; '.join(reasons) or 'not free yet'}", claims=mine)


def _unavailable_nodes(uuids: Set[str], supply: Supply) -> list[str]:
    return sorted({slot.node for slot in supply.slots if slot.uuid in uuids and not slot.available})
