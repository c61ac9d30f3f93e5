"""What requests ask of one node: equal demands are one kind, so that answers can be remembered. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gpuhub.engines.base import NodeSupply, Request
from gpuhub.engines.placement import WHOLE
from gpuhub.gpus import Card, Requirement


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a request asks of each of its nodes."""

    #: Whole GPUs, or 1 of which a part is asked for. With `is_spread`, at least 1.
    gpus: int
    is_spread: bool
    requirement: Requirement
    #: This model only: what `same_model` comes to, model by model.
    model: str | None
    share: int
    #: A part of a GPU that is divided already; otherwise of one that is not.
    joins: bool
    cpu_milli: int
    memory_mib: int
    is_exclusive: bool
    exclude: frozenset[str]

    @property
    def milli(self) -> int:
        """Thousandths of each GPU."""
        return WHOLE // self.share

    def accepts(self, card: Card) -> bool:
        """Whether the card will do."""
        return (self.model is None or card.model == self.model) and self.requirement.accepts(card)

    def accepts_node(self, node: NodeSupply) -> bool:
        """Whether the node will do, whatever it has."""
        return node.name not in self.exclude and self.requirement.accepts_driver(node.driver)

    def liked(self, cards: Iterable[Card]) -> tuple[Card, ...]:
        """Of these cards those that will do, best liked first, then the least capable."""
        return tuple(sorted((card for card in cards if self.accepts(card)), key=self._dearness))

    def _dearness(self, card: Card) -> tuple[int, int, tuple[int, int], str]:
        return self.requirement.liking(card) or 0, card.memory_mib, card.capability or (0, 0), card.model


def kinds_of(request: Request, cards: Mapping[Card, int]) -> tuple[Kind, ...]:
    """The ways to serve a request, best first: one of them must be open on all of its nodes."""
    kind = Kind(
        gpus=1 if request.spread is not None else request.gpus_per_node,
        is_spread=request.spread is not None,
        requirement=request.requirement,
        model=None,
        share=request.share,
        joins=False,
        cpu_milli=request.cpu_milli,
        memory_mib=request.memory_mib,
        is_exclusive=request.exclusive,
        exclude=request.exclude,
    )
    if request.size == 0:
        return (kind,)
    kinds = [kind]
    if request.same_model and request.size > 1:
        models = dict.fromkeys(card.model for card in kind.liked(cards))
        kinds = [replace(kind, model=model) for model in models]
    if request.share > 1:
        kinds = [replace(each, joins=joins) for joins in (True, False) for each in kinds]
    return tuple(kinds)
