"""Used GPU-time: how far back it counts, and what of it the engine does not see by itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpuhub.engines.base import Holding, Rules, Slot, Spent
from gpuhub.settings import Scheduling

#: After so many half-lives a thousandth is left of what was used.
HALF_LIVES = 10
_WEEK_S = 7 * 86400.0


def counts_since(scheduling: Scheduling, now: float) -> float:
    """The moment since which ended GPU-time still counts, for fair share or for limits a week."""
    return now - max(HALF_LIVES * scheduling.half_life, _WEEK_S)


def build_rules(scheduling: Scheduling) -> Rules:
    """The policy's numbers as the engine has them."""
    return Rules(
        half_life_s=scheduling.half_life,
        fair_share_s=scheduling.fair_share,
        priority_s=scheduling.priority_step,
        interactive_s=scheduling.interactive_first,
        backfill=scheduling.backfill,
        preemption=scheduling.preemption,
        card_values=scheduling.card_values,
    )


def given_back(before: Holding, after: Holding, now: float) -> Iterator[Spent]:
    """What a holding that goes on used and is not charged for any more: what it gave back, and in quarantine all."""
    if before.is_quarantined:
        return
    kept = {} if after.is_quarantined else {slot.uuid: slot for share in after.shares for slot in share.slots}
    for share in before.shares:
        for slot in share.slots:
            if slot.uuid not in kept:
                yield _spent(before, slot, now)


def _spent(holding: Holding, slot: Slot, now: float) -> Spent:
    return Spent(
        owner=holding.request.owner,
        groups=holding.request.groups,
        card=slot.card,
        share=holding.request.share,
        began_at=holding.granted_at,
        ended_at=max(now, holding.granted_at),
    )
