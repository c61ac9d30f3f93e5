"""What a launch wants of the GPUs it asks for, beside their number. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from gpu_launch.quantities import format_memory
from gpu_launch.wire import Gpu

#: A card sold as 32 GB reports some 2 % less, so that this part of the least memory is enough; as the broker has it.
_ENOUGH = 0.95


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Named as in the broker's job request."""

    #: Any of these, best liked first; empty for any.
    models: tuple[str, ...] = ()
    #: Of each GPU.
    least_memory_mib: int = 0
    same_model: bool = False
    #: Nothing else may run on the nodes.
    exclusive: bool = False
    #: The GPUs go back when others need them.
    scavenge: bool = False
    priority: int = 0
    #: None for the settings' own.
    time_limit_s: int | None = None

    @property
    def is_choosy(self) -> bool:
        """Whether not every GPU will do, so that one must know what a GPU is."""
        return bool(self.models or self.least_memory_mib or self.same_model)

    def accepts(self, card: Gpu, *, memory_mib: int | None = None) -> bool:
        """Whether a card is good enough by itself; `memory_mib` stands for the card's own where it is given."""
        has = card.memory_mib if memory_mib is None else memory_mib
        return (not self.models or card.model in self.models) and has >= self.least_memory_mib * _ENOUGH

    def most_on_a_node(self, cards: Iterable[Gpu]) -> int:
        """How many of a node's cards would do together."""
        models = [card.model for card in cards if self.accepts(card)]
        return max(map(models.count, models), default=0) if self.same_model else len(models)

    def body(self) -> dict[str, Any]:
        """The fields of the broker's job request that differ from its defaults."""
        chosen = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in chosen.items()
            if value != getattr(_NOTHING, name)
        }

    def describe(self, count: int) -> str:
        """For a person: `2 GPUs`, `1 RTX 5090 or RTX 5070 of at least 24 GiB`."""
        what = " or ".join(self.models) or "GPU"
        plural = "s" if count > 1 and len(self.models) < 2 else ""
        memory = f" of at least {format_memory(self.least_memory_mib)}" if self.least_memory_mib else ""
        return f"{count} {what}{plural}{memory}"


_NOTHING = Demand()
