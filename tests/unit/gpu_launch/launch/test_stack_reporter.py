"""When the stacks of silent ranks are shown."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from gpu_launch.common.run_folder import create_run
from gpu_launch.launch.stack_reporter import StackReporter, StallWatch


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


@pytest.fixture
def reporter(tmp_path):
    """The reporter of a launch without ranks, whose lines are in `lines`."""
    run, lines = create_run(tmp_path), []
    membership = SimpleNamespace(participants=(), nproc_per_node=1, ranks=0)
    made = StackReporter(
        run,
        pool=run,
        agents=SimpleNamespace(node_infos=lambda _: []),
        ranks=SimpleNamespace(activity=0, membership=membership),
        after_s=3.0,
        print_line=lines.append,
    )
    made.lines = lines
    yield made
    made.close()


def count_reports(reporter, seconds, *, until=0):
    """Poll once a second from the first of `seconds` on; return the number of reports when there are `until`."""
    for second in range(*seconds):
        reporter.poll(float(second))
    deadline = time.monotonic() + 10.0
    while len(reporter.lines) < until and time.monotonic() < deadline:
        time.sleep(0.01)
        reporter.poll(float(seconds[1] - 1))
    return len(reporter.lines)


def test_idle_ranks_are_not_watched_and_each_cell_is(reporter):
    """A cell's silence counts from its start, and is reported whether or not that of the cell before was."""
    reporter.set_idle(True)
    assert count_reports(reporter, (0, 100)) == 0
    reporter.set_idle(False)
    assert count_reports(reporter, (100, 103)) == 0
    assert count_reports(reporter, (103, 110), until=1) == 1
    # The next cell starts at once.
    reporter.set_idle(True)
    reporter.set_idle(False)
    assert count_reports(reporter, (110, 113), until=1) == 1
    assert count_reports(reporter, (113, 120), until=2) == 2
