"""When the stacks of silent ranks are shown."""

from __future__ import annotations

from gpu_launch.launch.stack_reporter import StallWatch


def watch(limit_s, *polls):
    """Poll once a second from 0 on, each with an activity; return the seconds at which a stall was reported."""
    stall = StallWatch(limit_s)
    return [second for second, activity in enumerate(polls) if stall.is_stalled(activity, float(second))]


def test_each_silence_is_reported_once():
    assert watch(3, *[0] * 10) == [3]
    assert watch(3, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2) == [5, 10]


def test_zero_is_never():
    assert watch(0, *[0] * 100) == []


def test_time_in_which_nobody_watched_is_no_silence():
    """A session between two cells, or a laptop that slept."""
    stall = StallWatch(3)
    assert not stall.is_stalled(0, 0.0)
    assert not stall.is_stalled(0, 1.0)
    assert not stall.is_stalled(0, 100.0)
    assert not stall.is_stalled(0, 102.0)
    assert stall.is_stalled(0, 103.0)
