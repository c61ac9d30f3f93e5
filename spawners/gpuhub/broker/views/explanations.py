"""Explanations why requests wait: the most expensive answer of the broker, so each caller gets one at a time.

An answer is computed in steps, one for each requirement of the request, between which the event loop serves others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.views import serializers, slices
from gpuhub.broker_api.schemas import PendingReasonView
from gpuhub.common.errors import Conflict
from gpuhub.domain.models import LeaseRow
from gpuhub.scheduler.interface import Constraint

#: An explanation is computed again after this time even if nothing has changed, seconds.
MAX_AGE_S = 1.0
#: Maximum number of explanations that are kept.
MAX_KEPT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptExplanation:
    view: PendingReasonView
    #: Objects that it was computed from, which are replaced at every change, never edited.
    inputs: tuple[object, ...]
    #: When it was computed; monotonic.
    computed_at: float


class PendingExplainer:
    """Computes explanations, one at a time, and keeps them while nothing changes."""

    def __init__(self, core: BrokerState) -> None:
        self._core = core
        self._kept: dict[str, _KeptExplanation] = {}
        self._turns = slices.FairTurns()

    async def explain(self, caller: str, lease: LeaseRow) -> PendingReasonView:
        """Return why a request waits.

        Raises:
            Conflict: It does not wait any more.
        """
        asked_at = self._core.clock.monotonic()
        async with self._turns.take(caller):
            return self._find_kept(lease.id, asked_at) or await self._compute(lease)

    async def _compute(self, lease: LeaseRow) -> PendingReasonView:
        core, inputs, computed_at = self._core, self._inputs(), self._core.clock.monotonic()
        now = core.clock.now()
        try:
            reason = core.scheduler.explain_pending(lease.id, now)
        except KeyError:
            raise Conflict(f"lease {lease.id} is just being granted") from None
        constraints = await slices.collect(core.scheduler.find_constraints(lease.id, now))
        view = serializers.build_why(lease, reason, sort_constraints(constraints))
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        self._kept[lease.id] = _KeptExplanation(view=view, inputs=inputs, computed_at=computed_at)
        return view

    def _find_kept(self, lease_id: str, asked_at: float) -> PendingReasonView | None:
        """Return an explanation that is younger than the question, or that nothing has changed since."""
        kept = self._kept.get(lease_id)
        if kept is None:
            return None
        is_same = all(old is new for old, new in zip(kept.inputs, self._inputs(), strict=True))
        is_current = is_same and self._core.clock.monotonic() - kept.computed_at <= MAX_AGE_S
        return kept.view if is_current or kept.computed_at > asked_at else None

    def _inputs(self) -> tuple[object, ...]:
        core = self._core
        return (core.ledger.snapshot, core.capacity.inventory, core.capacity.cordons, core.capacity.reservations)


def sort_constraints(constraints: Sequence[Constraint]) -> list[Constraint]:
    """Return the constraint first that delays its request most; those with unknown effect are last."""
    return sorted(
        constraints, key=lambda constraint: inf if constraint.would_start_at is None else constraint.would_start_at
    )
