"""What an enforced circuit can still supply to GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuhub.scheduler.interface import GpuSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerHeadroom:
    """What a circuit can still supply to GPUs at one moment."""

    #: Watts; negative where power limits were raised while GPUs were in use.
    free: int
    #: UUIDs of the GPUs that are in use then: they need nothing more.
    powered: frozenset[str] = frozenset()

    def count_watts(self, slots: Iterable[GpuSlot]) -> int:
        """Return what it takes to use these GPUs as well, watts."""
        return sum({slot.whole_uuid: slot.watts or 0 for slot in slots if slot.whole_uuid not in self.powered}.values())

    def use(self, slots: Sequence[GpuSlot]) -> PowerHeadroom:
        """Return what is left once these GPUs are in use."""
        return PowerHeadroom(
            free=self.free - self.count_watts(slots), powered=self.powered.union(slot.whole_uuid for slot in slots)
        )

    def allows(self, slots: Sequence[GpuSlot]) -> bool:
        """Return whether these GPUs can be used as well."""
        needed = self.count_watts(slots)
        return not needed or needed <= self.free
