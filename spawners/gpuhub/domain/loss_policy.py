"""How often a persistent notebook asks again for its GPUs: a server that ends at once must not do so for ever."""

from __future__ import annotations

from collections.abc import Sequence

#: Maximum number of restarts within `WINDOW_S`; the next loss ends the notebook.
MOST_RESTARTS = 3
#: Period in which restarts are counted, seconds.
WINDOW_S = 3600.0


def record_loss(losses: Sequence[float], now: float) -> tuple[float, ...]:
    """Return the times of the losses that count, seconds, with the one of now."""
    return (*(at for at in losses if now - WINDOW_S < at <= now), now)


def may_restart(losses: Sequence[float]) -> bool:
    """Return whether the notebook asks again after these losses."""
    return len(losses) <= MOST_RESTARTS
