"""Whether a node is on, asleep or on its way, and how long it takes to wake. Times are seconds since 1970."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from statistics import median
from typing import Self

from gpuhub.common.units import format_span

#: Number of measured times that are kept for each node.
MAX_WAKE_TIMES = 5


class PowerState(StrEnum):
    """What is expected of a node that may sleep."""

    ON = "on"
    #: It takes no work, and was or will be put to sleep.
    STOPPING = "stopping"
    ASLEEP = "asleep"
    #: It was woken and does not answer yet.
    WAKING = "waking"
    #: It was woken and did not answer in time.
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerStatus:
    """The power of one node; changes return a copy."""

    node: str
    state: PowerState = PowerState.ON
    #: Time of the last change of the state.
    changed_at: float = 0.0
    #: How long the last wakings took, seconds; the newest is the last one.
    wake_times_s: tuple[float, ...] = ()
    #: Time from which the queue may wake it again; None where nothing has failed.
    retry_at: float | None = None
    #: Why it was not woken, or not put to sleep, for people.
    error: str | None = None

    @property
    def usual_wake_s(self) -> float | None:
        """Return how long it usually takes to wake; None before the first time."""
        return median(self.wake_times_s) if self.wake_times_s else None

    @property
    def takes_work(self) -> bool:
        """Return whether it takes work as far as its power is concerned; a node that failed may still come up."""
        return self.state in {PowerState.ON, PowerState.FAILED}

    def begin(self, state: PowerState, now: float) -> Self:
        """Return it in another state, without the error of an earlier attempt."""
        return replace(self, state=state, changed_at=now, error=None, retry_at=None)

    def record_awake(self, now: float, wake_time_s: float | None = None) -> Self:
        """Return it as on; `wake_time_s` is how long that took, None if nobody measured it."""
        awake = self.begin(PowerState.ON, now)
        if wake_time_s is None:
            return awake
        return replace(awake, wake_times_s=(*self.wake_times_s, wake_time_s)[-MAX_WAKE_TIMES:])

    def record_failure(self, error: str, now: float, retry_after_s: float) -> Self:
        """Return it as not woken, with the time of the next attempt."""
        return replace(self, state=PowerState.FAILED, changed_at=now, error=error, retry_at=now + retry_after_s)

    def record_refusal(self, error: str, now: float) -> Self:
        """Return it as still on, with the reason why it does not sleep."""
        return replace(self, state=PowerState.ON, changed_at=now, error=error, retry_at=None)


def record_switch(power: PowerStatus, state: PowerState, now: float) -> PowerStatus:
    """Return the power of a node that another scheduler switches; how long it took to wake is measured."""
    if state is not PowerState.ON:
        return power.begin(state, now)
    was_woken = power.state is PowerState.WAKING
    return power.record_awake(now, max(now - power.changed_at, 0.0) if was_woken else None)


def describe_power(power: PowerStatus) -> str | None:
    """Return the state for people, such as `waking, usually up after 40 s`; None for a node that is on.

    The text does not change with time.
    """
    if power.state is PowerState.STOPPING:
        return "going to sleep"
    usual = power.usual_wake_s
    if power.state is PowerState.ASLEEP:
        return "asleep, woken when the queue needs it" + (
            "" if usual is None else f" (usually up after {format_span(usual)})"
        )
    if power.state is PowerState.WAKING:
        return "waking" + ("" if usual is None else f", usually up after {format_span(usual)}")
    if power.state is PowerState.FAILED and power.retry_at is not None:
        again = datetime.fromtimestamp(power.retry_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        return f"{power.error}; not tried again before {again}, or `gpuhub node power on {power.node}`"
    return None
