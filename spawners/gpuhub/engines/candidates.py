"""What a request could ever use."""

from __future__ import annotations

from gpuhub.engines.base import Request
from gpuhub.engines.kinds import kinds_of
from gpuhub.engines.stock import Stock


def candidate_slots(request: Request, stock: Stock) -> dict[str, frozenset[str]]:
    """Every GPU that a request could ever use, free or not, by node: good enough, on a node with enough of such."""
    found: dict[str, frozenset[str]] = {}
    for kind in kinds_of(request, stock.cards):
        accepted = {number for card, number in stock.cards.items() if kind.accepts(card)}
        for name, node in stock.nodes.items():
            slots = zip(node.supply.slots, node.cards, strict=True)
            uuids = frozenset(slot.uuid for slot, number in slots if number in accepted)
            if uuids and kind.gpus and len(uuids) >= kind.gpus and kind.accepts_node(node.supply):
                found[name] = found.get(name, frozenset()) | uuids
    return found
