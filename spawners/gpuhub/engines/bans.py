"""What some requests may not use of a node. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """What some requests may not use of one node."""

    slots: frozenset[str] = frozenset()
    #: Nothing at all may be used.
    is_whole: bool = False
    #: What may be used at most; None for no limit.
    cpu_milli: int | None = None
    memory_mib: int | None = None

    def joined(self, other: Ban) -> Ban:
        """Both."""
        return Ban(
            slots=self.slots | other.slots,
            is_whole=self.is_whole or other.is_whole,
            cpu_milli=_least(self.cpu_milli, other.cpu_milli),
            memory_mib=_least(self.memory_mib, other.memory_mib),
        )


def _least(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
