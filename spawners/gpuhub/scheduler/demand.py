"""The demand of a request: what it takes of each node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gpuhub.common.gpu import GpuRequirement, GpuSpec
from gpuhub.scheduler.interface import NodeCapacity, SchedulingRequest

#: A whole GPU in thousandths; a GPU share is less.
WHOLE = 1000


#: Stands for CPU or memory of a node for which the settings give no number.
UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class NodeDemand:
    """Resources that a request takes of one node."""

    #: Whole GPUs if `milli` is `WHOLE`; otherwise 1, and `milli` thousandths of it. 0: no GPU.
    gpus: int
    #: Acceptable cards; None for any.
    cards: tuple[GpuSpec, ...] | None = None
    #: The order of `cards` is the user's preference, first one first; otherwise the policy chooses among them.
    has_preference: bool = False
    milli: int = WHOLE
    cpu_milli: int = 0
    memory_mib: int = 0
    #: Nothing else may run on the node.
    exclusive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandVariant:
    """One way to serve a request, the same on each of its nodes."""

    #: Whole GPUs, or 1 for a GPU share. With `is_spread` at least 1.
    gpus: int
    is_spread: bool
    requirement: GpuRequirement
    #: This model only: `same_model` has one variant for each model; None for any.
    model: str | None
    share: int
    #: True for a share of a GPU that is divided already, False for a share of one that is not.
    joins_shared_gpu: bool
    cpu_milli: int
    memory_mib: int
    cpu_by_gpu: bool = False
    memory_by_gpu: bool = False
    is_exclusive: bool
    exclude: frozenset[str]
    #: The owner's groups that some node is restricted to.
    groups: frozenset[str] = frozenset()

    @property
    def milli(self) -> int:
        """Thousandths of each GPU."""
        return WHOLE // self.share

    def accepts(self, card: GpuSpec) -> bool:
        return (self.model is None or card.model == self.model) and self.requirement.accepts(card)

    def accepts_node(self, node: NodeCapacity) -> bool:
        """Return whether the node is acceptable, regardless of its GPUs."""
        return (
            node.name not in self.exclude and self.requirement.accepts_driver(node.driver) and node.admits(self.groups)
        )

    def rank_cards(self, cards: Iterable[GpuSpec]) -> tuple[GpuSpec, ...]:
        """Return the acceptable ones of these cards, preferred card first, then the least capable."""
        return tuple(sorted((card for card in cards if self.accepts(card)), key=self._card_preference))

    def _card_preference(self, card: GpuSpec) -> tuple[int, int, tuple[int, int], str]:
        return self.requirement.preference_rank(card) or 0, card.memory_mib, card.capability or (0, 0), card.model


def list_variants(
    request: SchedulingRequest, cards: Mapping[GpuSpec, int], node_groups: frozenset[str]
) -> tuple[DemandVariant, ...]:
    """Return the ways to serve a request, preferred way first; all of a request's nodes use the same one.

    Args:
        cards: All cards of the cluster.
        node_groups: The groups that some node is restricted to.
    """
    variant = DemandVariant(
        gpus=1 if request.spread is not None else request.gpus_per_node,
        is_spread=request.spread is not None,
        requirement=request.requirement,
        model=None,
        share=request.share,
        joins_shared_gpu=False,
        cpu_milli=request.cpu_milli,
        memory_mib=request.memory_mib,
        cpu_by_gpu=request.cpu_by_gpu,
        memory_by_gpu=request.memory_by_gpu,
        is_exclusive=request.exclusive,
        exclude=request.exclude,
        groups=request.groups & node_groups,
    )
    if request.size == 0:
        return (variant,)
    variants = [variant]
    if request.same_model and request.size > 1:
        models = dict.fromkeys(card.model for card in variant.rank_cards(cards))
        variants = [replace(variant, model=model) for model in models]
    if request.share > 1:
        variants = [replace(variant, joins_shared_gpu=joins) for joins in (True, False) for variant in variants]
    return tuple(variants)
