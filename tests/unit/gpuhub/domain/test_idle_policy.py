"""When idle notebooks are warned and stopped; all times are given, no clock runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhub.broker_api.schemas import IdleReason, Purpose
from gpuhub.common.errors import Conflict
from gpuhub.config.containers.idle import IdleSettings
from gpuhub.domain import idle_policy
from gpuhub.domain.idle_policy import IdleAssessment, IdleObservation
from gpuhub.domain.models import LeaseRow, ResourceRequest

HOUR = 3600.0
LIMITS = IdleSettings(stop_after="1h")
LOW_USE = IdleSettings(low_use_after="2h")
LEASE = LeaseRow(
    id="l1", seq=1, key="k", owner="ada", purpose=Purpose.NOTEBOOK, subject="", profile="gpu",
    resources=ResourceRequest(), created_at=0, since=0,
)  # fmt: skip


def observe(**values: Any) -> IdleObservation:
    given_values = {"report_age_s": 1.0, "is_busy": False, "inactive_s": 0.0, "used_s": None, "unused_s": None}
    return IdleObservation(**{**given_values, **values})


def found(limits: IdleSettings, **values: Any) -> IdleAssessment:
    assessment = idle_policy.assess(limits, observe(**values))
    assert assessment is not None
    return assessment


def test_inactive_notebook_is_warned_and_then_due():
    """The countdown runs from the last activity; the warning is the last part of it."""
    assert found(LIMITS, inactive_s=1800) == IdleAssessment(
        reason=IdleReason.INACTIVE, idle_s=1800, stops_in_s=1800, is_warned=False
    )
    assert found(LIMITS, inactive_s=3060).is_warned
    assert found(LIMITS, inactive_s=3060, warned_s=60).stops_in_s == 540
    assert found(LIMITS, inactive_s=3700, warned_s=650).stops_in_s == 0


def test_low_use_counts_also_while_the_user_is_active():
    """The second policy looks at the GPUs alone, and does nothing where their use is not known."""
    assessment = found(LOW_USE, inactive_s=0, unused_s=5400)
    assert (assessment.reason, assessment.idle_s, assessment.stops_in_s) == (IdleReason.LOW_USE, 5400, 1800)
    assert idle_policy.assess(LOW_USE, observe(inactive_s=9999, unused_s=None)) is None


def test_the_policy_that_ends_first_counts():
    """With both, the nearer end and its reason are shown."""
    both = IdleSettings(stop_after="1h", low_use_after="2h")
    assert found(both, inactive_s=60, unused_s=7000).reason is IdleReason.LOW_USE
    assert found(both, inactive_s=3000, unused_s=60).reason is IdleReason.INACTIVE


def test_use_of_the_gpu_is_activity():
    """A thread that computes while the kernel is idle keeps the notebook."""
    assert found(LIMITS, inactive_s=9999, used_s=30).idle_s == 30


@pytest.mark.parametrize(
    "values", [{"is_busy": True}, {"report_age_s": None}, {"report_age_s": idle_policy.REPORT_TIMEOUT_S + 1}]
)
def test_nothing_is_decided_while_something_runs_or_reports_are_missing(values: dict[str, Any]):
    """Neither policy counts then, however long it has been idle."""
    both = IdleSettings(stop_after="1h", low_use_after="2h")
    assert idle_policy.assess(both, observe(inactive_s=1e6, unused_s=1e6, warned_s=1e6, **values)) is None


def test_end_of_a_long_cell_is_warned_for_the_whole_time():
    """After hours of low use in one cell, the warning starts when the cell ends."""
    assessment = found(LOW_USE, unused_s=10 * HOUR)
    assert (assessment.is_warned, assessment.stops_in_s) == (True, 600)
    assert found(LOW_USE, unused_s=10 * HOUR, warned_s=600).stops_in_s == 0


def test_kept_notebook_is_warned_again_before_the_end_of_that_time():
    """The button moves the end, and the last minutes are announced as before."""
    assert not found(LIMITS, inactive_s=3600, kept_s=3600).is_warned
    assert found(LIMITS, inactive_s=6700, kept_s=500).stops_in_s == 600


def test_a_notebook_is_stopped_only_on_a_fresh_report():
    """An end that has come waits for a report that is some seconds old at most."""
    due = IdleAssessment(reason=IdleReason.INACTIVE, idle_s=3600, stops_in_s=0, is_warned=True)
    assert idle_policy.may_stop(due, idle_policy.FRESH_REPORT_S)
    assert not idle_policy.may_stop(due, idle_policy.FRESH_REPORT_S + 0.1)
    assert not idle_policy.may_stop(due, None)
    assert not idle_policy.may_stop(None, 0.0)
    assert not idle_policy.may_stop(replace(due, stops_in_s=0.1), 0.0)


def test_reports_are_frequent_near_the_end_only():
    """The last report before the end is then fresh."""
    warned = IdleAssessment(reason=IdleReason.INACTIVE, idle_s=3600, stops_in_s=15, is_warned=True)
    assert idle_policy.choose_report_period(warned) < idle_policy.FRESH_REPORT_S
    assert idle_policy.choose_report_period(replace(warned, stops_in_s=60)) == idle_policy.REPORT_PERIOD_S
    assert idle_policy.choose_report_period(None) == idle_policy.REPORT_PERIOD_S


def test_keep_is_limited_in_all():
    """Each press gives an hour from then, and all of them together four hours since the first."""
    lease, now, ends = LEASE, 10 * HOUR, []
    for _ in range(5):
        lease = idle_policy.keep(lease, LIMITS, idle_since=9 * HOUR, now=now)
        ends.append(lease.kept_until)
        now += 0.9 * HOUR
    assert ends == [pytest.approx(hour * HOUR) for hour in (11, 11.9, 12.8, 13.7, 14)]
    assert idle_policy.find_keep_s(lease, LIMITS, 9 * HOUR, now) == 0
    with pytest.raises(Conflict, match=r"the limit is 4 h until it is used again. Run a cell"):
        idle_policy.keep(lease, LIMITS, idle_since=9 * HOUR, now=now)


def test_use_renews_what_can_be_kept():
    """What was kept before the notebook was used does not count."""
    spent = LEASE.evolve(kept_from=10 * HOUR, kept_until=14 * HOUR)
    kept = idle_policy.keep(spent, LIMITS, idle_since=15 * HOUR, now=16 * HOUR)
    assert (kept.kept_from, kept.kept_until) == (16 * HOUR, 17 * HOUR)
    assert idle_policy.find_keep_s(spent, LIMITS, 15 * HOUR, 16 * HOUR) == 3600


def test_without_a_longest_time_there_is_no_button():
    """`longest_keep = "0s"` refuses the first press."""
    assert idle_policy.find_keep_s(LEASE, IdleSettings(stop_after="1h", longest_keep="0s"), 0, 3600) == 0


def test_texts_name_span_and_reason():
    """Texts for the owner, before and after."""
    assert idle_policy.describe_state(IdleReason.INACTIVE, 3017, LIMITS) == "no activity for 50 min"
    assert idle_policy.describe_state(IdleReason.LOW_USE, 7200, LIMITS) == "its GPUs were used less than 5 % for 2 h"
    stopped = idle_policy.describe_stop(IdleReason.INACTIVE, 3601, LIMITS)
    assert stopped == "stopped after 1 h without activity; files are kept"
    assert idle_policy.describe_stop(IdleReason.LOW_USE, 7201, LIMITS).startswith(
        "stopped after 2 h with GPU use below 5"
    )


AGES = st.floats(min_value=0, max_value=1e6)


@given(inactive_s=AGES, used_s=st.none() | AGES, unused_s=st.none() | AGES, kept_s=AGES, warned_s=st.none() | AGES)
def test_nobody_is_stopped_without_the_whole_warning(inactive_s, used_s, unused_s, kept_s, warned_s):
    """Whatever was seen: an end needs a warning of full length, and no time left that the owner keeps it."""
    limits = IdleSettings(stop_after="1h", low_use_after="2h")
    seen = observe(inactive_s=inactive_s, used_s=used_s, unused_s=unused_s, kept_s=kept_s, warned_s=warned_s)
    if idle_policy.may_stop(idle_policy.assess(limits, seen), 0.0):
        assert kept_s == 0
        assert warned_s is not None
        assert warned_s >= limits.warn_before
        assert min(inactive_s, inactive_s if used_s is None else used_s) >= 3600 or (unused_s or 0) >= 7200
