"""Shares of a batch: whole numbers in proportion to the ranks' speeds."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpu_launch.errors import UsageError
from gpu_launch.training import shares
from gpu_launch.training.shares import split_batch

SPEEDS = st.lists(st.floats(0, 1e15), min_size=1, max_size=9).filter(any)
BATCHES = st.integers(1, 4096)


@pytest.mark.parametrize(
    ("samples", "speeds", "most", "expected"),
    [
        (18, (10, 5, 3), None, (10, 5, 3)),
        # 7.78, 3.89 and 2.33: with one more, the first two end after 0.8, the third after 1.
        (14, (10, 5, 3), None, (8, 4, 2)),
        # 35.4, 35.4, 15.6 and 9.6: the fast ones take what is left, as one sample is less time for them.
        (96, (59, 59, 26, 16), None, (36, 36, 15, 9)),
        # 9.8 and 0.2: the slow one computes a sample in any case.
        (10, (49, 1), None, (9, 1)),
        # Equal speeds: to the lower ranks.
        (5, (1, 1, 1), None, (2, 2, 1)),
        (2, (1, 1, 1), None, (1, 1, 0)),
        (1, (1, 3, 3), None, (0, 1, 0)),
        (7, (0, 1), None, (0, 7)),
        # The first is bounded; the others divide the remaining 10 by 5 : 3.
        (18, (10, 5, 3), (8, 18, 18), (8, 6, 4)),
        # The second reaches its bound only with what the first could not take.
        (18, (10, 5, 3), (8, 5, 18), (8, 5, 5)),
        (18, (10, 5, 3), (6, 6, 6), (6, 6, 6)),
        (3, (10, 5, 3), (0, 2, 1), (0, 2, 1)),
    ],
)
def test_shares_are_proportional_and_bounded(samples, speeds, most, expected):
    """Worked by hand."""
    assert split_batch(samples, speeds, most) == expected


@settings(deadline=None)
@given(BATCHES, SPEEDS)
def test_no_other_shares_let_the_last_rank_end_earlier(samples, speeds):
    """They add up, no rank is a whole sample below its proportion, and no sample can be moved to end earlier."""
    parts = split_batch(samples, speeds)
    exact = [Fraction(speed) for speed in speeds]
    assert sum(parts) == samples
    assert all(samples * speed / sum(exact) - part < 1 for part, speed in zip(parts, exact, strict=True))
    # A rank with one sample computes as long without it, on a sample that does not count.
    last = max((part / speed for part, speed in zip(parts, exact, strict=True) if part > 1), default=0)
    assert all((part + 1) / speed >= last for part, speed in zip(parts, exact, strict=True) if speed)


@settings(deadline=None)
@given(BATCHES, SPEEDS)
def test_faster_rank_gets_no_fewer_samples(samples, speeds):
    """Ranks in the order of their speeds, and equal ones by number, have shares in that order."""
    parts = split_batch(samples, speeds)
    order = sorted(range(len(speeds)), key=lambda rank: (-speeds[rank], rank))
    assert [parts[rank] for rank in order] == sorted(parts, reverse=True)


@settings(deadline=None)
@given(st.data(), SPEEDS)
def test_bounds_hold_and_only_bounded_ranks_get_less_than_their_proportion(data, speeds):
    """A rank below its bound computes for as long as any other, up to one sample."""
    most = data.draw(st.lists(st.integers(0, 500), min_size=len(speeds), max_size=len(speeds)))
    room = sum(bound for bound, speed in zip(most, speeds, strict=True) if speed)
    assume(room)
    samples = data.draw(st.integers(1, room))
    parts = split_batch(samples, speeds, most)
    assert sum(parts) == samples
    assert all(0 <= part <= bound for part, bound in zip(parts, most, strict=True))
    unbounded = [
        (Fraction(speed), part)
        for part, bound, speed in zip(parts, most, speeds, strict=True)
        if part < bound and speed
    ]
    for slow, slow_part in unbounded:
        for fast, fast_part in zip(map(Fraction, speeds), parts, strict=True):
            if fast:
                assert (slow_part + 1) / slow > (fast_part - 1) / fast


@settings(deadline=None)
@given(BATCHES, SPEEDS, st.integers(-8, 8))
def test_only_ratios_of_speeds_matter(samples, speeds, exponent):
    """Samples per second and floating-point operations per second give the same shares."""
    # A power of two changes no digit, unless the number leaves the range of floating point.
    scaled = [speed * 2.0**exponent for speed in speeds]
    assume(all(value / 2.0**exponent == speed for value, speed in zip(scaled, speeds, strict=True)))
    assert split_batch(samples, scaled) == split_batch(samples, speeds)


@pytest.mark.parametrize(
    ("speeds", "text"),
    [
        ((1, 2), "speeds has 2 values, and there are 3 ranks"),
        ((1, -2, 1), "the speed of rank 1 is -2"),
        ((1, 1, float("nan")), "the speed of rank 2 is nan"),
        ((float("inf"), 1, 1), "the speed of rank 0 is inf"),
        ((0, 0, 0), "the speeds of all ranks are 0"),
    ],
)
def test_wrong_speeds_are_refused(speeds, text):
    """Each names the rank and the value."""
    with pytest.raises(UsageError, match=text):
        shares.check_speeds(speeds, 3)


def test_bound_of_a_rank_is_its_own_or_its_place_in_the_list():
    """Without a bound, a rank takes a whole batch at most."""
    assert shares.find_bound(None, rank=1, ranks=3, batch=18) == 18
    assert shares.find_bound(7, rank=1, ranks=3, batch=18) == 7
    assert shares.find_bound([1, 2, 3], rank=1, ranks=3, batch=18) == 2


@pytest.mark.parametrize(
    ("most", "text"),
    [
        ((1, 2), "most has 2 values, and there are 3 ranks"),
        (-1, "most of rank 1 is -1"),
        ((1, 2.5, 3), "most of rank 1 is 2.5"),
        (True, "most of rank 1 is True"),
    ],
)
def test_wrong_bounds_are_refused(most, text):
    """Each names the rank and the value."""
    with pytest.raises(UsageError, match=text):
        shares.find_bound(most, rank=1, ranks=3, batch=18)


def test_bounds_below_the_batch_are_refused_with_what_is_missing():
    """A rank with speed 0 takes nothing, whatever its bound is."""
    shares.check_room((6, 6, 6), (1, 1, 1), 18)
    with pytest.raises(UsageError, match=r"at most 12 samples together \(most by rank: 6, 6, 6; .*6 fewer than"):
        shares.check_room((6, 6, 6), (1, 0, 1), 18)


def test_rank_without_a_time_keeps_its_relation_to_the_others():
    """Known speeds can have another unit than measured ones."""
    assert shares.update_speeds((100, 50, 10), (4.0, 2.0, None)) == (4.0, 2.0, pytest.approx(0.4))
    assert shares.update_speeds((100, 50), (1.0, 2.0)) == (1.0, 2.0)
    assert shares.update_speeds((100, 50), (None, None)) == (100, 50)
    assert shares.update_speeds((0, 50), (None, 25.0)) == (0, 25.0)
    assert shares.update_speeds((0, 50), (3.0, None)) == (0, 50)


def test_gain_is_the_ratio_of_the_last_ranks_times():
    """6 samples of a rank with speed 1 take 6; with 2 : 4 : 6 at speeds 1 : 2 : 3, all take 2."""
    assert shares.compute_gain((4, 4, 4), (2, 4, 6), (1, 2, 3)) == 2
    assert shares.compute_gain((0, 12), (0, 12), (0, 3)) == 1
