"""One cell on its ranks: when to interrupt, to try the group, to renew it. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from gpu_launch.standing.executor import How

#: Seconds that ranks have to end by themselves after one has failed; those that wait for it in a collective never do.
LEFT_S = 5.0
#: Seconds that ranks have to come back after an interrupt, which native code does not hear; the killed ones have
#: stopped within two seconds, too.
INTERRUPT_S = 1.5


class Step(Enum):
    """What is to be done now."""

    WAIT = auto()
    #: Interrupt the ranks that still run; told once.
    INTERRUPT = auto()
    #: All have come back, not all well: is the group still usable?
    CHECK = auto()
    #: The group is lost: a rank is dead or does not come back.
    RENEW = auto()
    #: All have ended well.
    DONE = auto()


class Course:
    """What has happened to one cell."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ends: dict[int, How] = {}
        self._ranks = frozenset(ranks)
        self._failed_at: float | None = None
        self._interrupted_at: float | None = None
        self._is_dead = False
        #: How often the user has interrupted it.
        self.asked = 0

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that have not come back."""
        return tuple(sorted(self._ranks - self._ends.keys()))

    def end(self, rank: int, how: How, now: float) -> None:
        """A rank has come back."""
        self._ends[rank] = how
        if how is not How.DONE and self._failed_at is None:
            self._failed_at = now

    def die(self) -> None:
        """A rank or a node is gone, whether it ran the cell or not."""
        self._is_dead = True

    def interrupt(self) -> None:
        """The user interrupts it; a second time means at once."""
        self.asked += 1

    def step(self, now: float) -> Step:
        """What is to be done; time only goes on."""
        if self._is_dead:
            return Step.RENEW
        if not self.running:
            is_well = all(how is How.DONE for how in self._ends.values())
            return Step.DONE if is_well else Step.CHECK
        if self._interrupted_at is not None:
            is_over = now - self._interrupted_at >= INTERRUPT_S or self.asked > 1
            return Step.RENEW if is_over else Step.WAIT
        was_left = self._failed_at is not None and now - self._failed_at >= LEFT_S
        if self.asked or was_left:
            self._interrupted_at = now
            return Step.INTERRUPT
        return Step.WAIT
