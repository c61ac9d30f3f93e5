"""When an idle notebook is warned and stopped: two policies, and the time for which its owner keeps it.

The first counts time without any activity, the second time without use of the GPUs. Both count nothing while a cell,
a launch, ranks or a job of the notebook run, and nothing is decided without a recent report from the notebook itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuhub.broker_api.schemas import IdleReason
from gpuhub.common.errors import Conflict
from gpuhub.common.units import format_span
from gpuhub.config.containers.idle import IdleSettings
from gpuhub.domain.models import LeaseRow

#: Interval of a notebook's reports, seconds.
REPORT_PERIOD_S = 10.0
#: Interval of reports close to the notebook's end, seconds: the last one shows that no cell runs.
LAST_REPORT_PERIOD_S = 1.0
#: Time left from which on a notebook reports more often, seconds.
LAST_REPORTS_S = 20.0
#: Maximum age of a report that counts, seconds.
REPORT_TIMEOUT_S = 45.0
#: Maximum age of a report on which a notebook may be stopped, seconds.
FRESH_REPORT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleObservation:
    """What is known about one notebook at one moment."""

    #: Seconds since its last report; None if there is none.
    report_age_s: float | None
    #: Whether a cell, ranks or a job of it run.
    is_busy: bool
    #: Seconds since the last activity of a kernel, terminal or file.
    inactive_s: float
    #: Seconds since a reading that showed use of its GPUs; None for none.
    used_s: float | None
    #: Seconds for which every reading showed its GPUs unused; None where readings say nothing about this notebook.
    unused_s: float | None
    #: Seconds for which its owner still keeps it, and for which it has been warned; None if it was not.
    kept_s: float = 0.0
    warned_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleAssessment:
    """An idle notebook."""

    reason: IdleReason
    #: Seconds since it was active, or since its GPUs were used.
    idle_s: float
    #: Seconds until it may be stopped; 0 if it may be stopped now.
    stops_in_s: float
    is_warned: bool


def assess(limits: IdleSettings, seen: IdleObservation) -> IdleAssessment | None:
    """Return how long the notebook has been idle and when it is stopped; None while it is not idle, or not known."""
    inactive_s = find_inactive_s(seen)
    spans = [] if inactive_s is None else _list_spans(limits, inactive_s, seen.unused_s)
    if not spans:
        return None
    left_s, idle_s, reason = min(spans)
    left_s = max(left_s, seen.kept_s)
    if left_s > limits.warn_before:
        return IdleAssessment(reason=reason, idle_s=idle_s, stops_in_s=left_s, is_warned=False)
    # A notebook that became idle by the end of a long cell is warned for the whole time as well.
    left_s = max(left_s, limits.warn_before - (seen.warned_s or 0.0))
    return IdleAssessment(reason=reason, idle_s=idle_s, stops_in_s=left_s, is_warned=True)


def find_inactive_s(seen: IdleObservation) -> float | None:
    """Return the seconds without activity; None while the notebook is busy, or if that is not known."""
    if seen.is_busy or seen.report_age_s is None or seen.report_age_s > REPORT_TIMEOUT_S:
        return None
    # A thread that computes on the GPU while the kernel is idle is activity too.
    return seen.inactive_s if seen.used_s is None else min(seen.inactive_s, seen.used_s)


def _list_spans(
    limits: IdleSettings, inactive_s: float, unused_s: float | None
) -> Sequence[tuple[float, float, IdleReason]]:
    """Return for each policy the seconds left, the seconds counted, and its reason."""
    spans = []
    if limits.stop_after:
        spans.append((limits.stop_after - inactive_s, inactive_s, IdleReason.INACTIVE))
    if limits.low_use_after and unused_s is not None:
        spans.append((limits.low_use_after - unused_s, unused_s, IdleReason.LOW_USE))
    return spans


def may_stop(assessment: IdleAssessment | None, report_age_s: float | None) -> bool:
    """Return whether the notebook may be stopped now: its time is over, and it has just reported that nothing runs."""
    return (
        assessment is not None
        and assessment.is_warned
        and assessment.stops_in_s <= 0
        and report_age_s is not None
        and report_age_s <= FRESH_REPORT_S
    )


def choose_report_period(assessment: IdleAssessment | None) -> float:
    """Return the seconds until the notebook's next report."""
    is_near = assessment is not None and assessment.is_warned and assessment.stops_in_s <= LAST_REPORTS_S
    return LAST_REPORT_PERIOD_S if is_near else REPORT_PERIOD_S


def keep(lease: LeaseRow, limits: IdleSettings, idle_since: float, now: float) -> LeaseRow:
    """Keep an idle notebook for `limits.keep` from now, at most for `limits.longest_keep` since the first time.

    Args:
        lease: The notebook's lease.
        limits: The settings of its profile.
        idle_since: Since when it is idle; what was kept before that does not count.
        now: Seconds since 1970.

    Raises:
        Conflict: It was kept for the longest time already.
    """
    kept_from = now if lease.kept_from is None or lease.kept_from < idle_since else lease.kept_from
    until = min(now + limits.keep, kept_from + limits.longest_keep)
    if until <= now or (lease.kept_until is not None and until <= lease.kept_until):
        raise Conflict(
            f"the notebook cannot be kept for longer: the limit is {format_span(limits.longest_keep)} until it is "
            "used again. Run a cell, or let it stop: its files are kept"
        )
    return lease.evolve(kept_from=kept_from, kept_until=until)


def find_keep_s(lease: LeaseRow, limits: IdleSettings, idle_since: float, now: float) -> int:
    """Return for how many seconds from now `keep` would keep the notebook; 0 if it would refuse."""
    try:
        return round((keep(lease, limits, idle_since, now).kept_until or now) - now)
    except Conflict:
        return 0


def describe_state(reason: IdleReason, idle_s: float, limits: IdleSettings) -> str:
    """Return why a notebook counts as idle, for its owner, such as `no activity for 50 min`."""
    span = format_span(idle_s if idle_s < 60 else idle_s // 60 * 60)
    if reason is IdleReason.INACTIVE:
        return f"no activity for {span}"
    return f"its GPUs were used less than {limits.low_use} % for {span}"


def describe_stop(reason: IdleReason, idle_s: float, limits: IdleSettings) -> str:
    """Return why a notebook was stopped, for its owner, such as `stopped after 60 min without activity`."""
    span = format_span(idle_s if idle_s < 60 else idle_s // 60 * 60)
    what = "without activity" if reason is IdleReason.INACTIVE else f"with GPU use below {limits.low_use} %"
    return f"stopped after {span} {what}; files are kept"
