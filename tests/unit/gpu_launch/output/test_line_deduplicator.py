"""Equal lines of several ranks are shown once, and each rank's lines in their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_launch.output.line_deduplicator import MAX_WAIT_S, LineDeduplicator, OutputLine

ALL = frozenset({0, 1, 2})


def output_lines(*parts):
    """(ranks, line) as the fold gives them."""
    return [OutputLine(ranks, "stdout", line) for ranks, line in parts]


def test_line_of_all_ranks_is_shown_once_without_delay():
    """It waits for nobody else."""
    fold = LineDeduplicator()
    for rank in ALL:
        fold.feed(rank, "stdout", ["step 1", "step 2"], 0.0)
    assert fold.drain(ALL, 0.0) == output_lines(((0, 1, 2), "step 1"), ((0, 1, 2), "step 2"))


def test_line_waits_briefly_for_duplicates_of_other_ranks():
    """With those that have come."""
    fold = LineDeduplicator()
    fold.feed(0, "stdout", ["step 1"], 0.0)
    assert fold.drain(ALL, MAX_WAIT_S / 2) == []
    fold.feed(2, "stdout", ["step 1"], MAX_WAIT_S / 2)
    assert fold.drain(ALL, MAX_WAIT_S) == output_lines(((0, 2), "step 1"))
    fold.feed(1, "stdout", ["step 1"], MAX_WAIT_S)
    assert fold.drain(ALL, 2 * MAX_WAIT_S) == output_lines(((1,), "step 1"))


def test_single_rank_is_not_delayed():
    """Nor do ranks whose peers have ended, or are not shown."""
    fold = LineDeduplicator()
    fold.feed(0, "stdout", ["a"], 0.0)
    assert fold.drain(frozenset({0}), 0.0) == output_lines(((0,), "a"))
    fold.feed(1, "stdout", ["b"], 0.0)
    assert fold.drain(frozenset({1}), 0.0) == output_lines(((1,), "b"))
    fold.feed(0, "stdout", ["c"], 0.0)
    assert fold.drain(frozenset(), 0.0) == output_lines(((0,), "c"))


def test_line_of_one_rank_does_not_split_common_lines():
    """Rank 0 warns before the line that all have in common."""
    fold = LineDeduplicator()
    fold.feed(0, "stdout", ["saved", "step 1"], 0.0)
    for rank in (1, 2):
        fold.feed(rank, "stdout", ["step 1"], 0.0)
    assert fold.drain(ALL, MAX_WAIT_S) == output_lines(((0,), "saved"), ((0, 1, 2), "step 1"))


def test_a_block_of_one_rank_stays_together():
    """Lines that differ by rank are not shuffled into each other."""
    fold = LineDeduplicator()
    for rank in (0, 1):
        fold.feed(rank, "stdout", [f"{line} of {rank}" for line in "abc"], 0.0)
    shown = [(one.ranks, one.line) for one in fold.drain(ALL, MAX_WAIT_S)]
    assert shown == [((rank,), f"{line} of {rank}") for rank in (0, 1) for line in "abc"]


def test_streams_are_deduplicated_separately():
    """They go to different places."""
    fold = LineDeduplicator()
    fold.feed(0, "stdout", ["x"], 0.0)
    fold.feed(1, "stderr", ["x"], 0.0)
    assert len(fold.drain(frozenset({0, 1}), MAX_WAIT_S)) == 2


CHUNKS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["stdout", "stderr"]),
        st.lists(st.sampled_from(["", "a", "b", "c", "step 1"]), max_size=4),
        st.floats(0, 0.2),
        st.sampled_from([(), (0,), (0, 1), (0, 1, 2, 3)]),
    ),
    max_size=25,
)


@given(CHUNKS)
def test_deduplication_keeps_lines_and_order_of_each_rank(chunks):
    """Whatever ranks say, and whenever they are looked at: each rank's lines are those it said, in its order."""
    fold, now = LineDeduplicator(), 0.0
    fed: dict[int, list[tuple[str, str]]] = {}
    shown: list[OutputLine] = []
    for rank, stream, lines, later, speaking in chunks:
        now += later
        fold.feed(rank, stream, lines, now)
        fed.setdefault(rank, []).extend((stream, line) for line in lines)
        shown += fold.drain(frozenset(speaking), now)
    shown += fold.drain(frozenset(range(4)), now, everything=True)
    assert all(one.ranks == tuple(sorted(set(one.ranks))) for one in shown)
    for rank in range(4):
        assert [(one.stream, one.line) for one in shown if rank in one.ranks] == fed.get(rank, [])


@given(CHUNKS)
def test_no_line_is_delayed_beyond_the_limit(chunks):
    """After the wait nothing is left that came before it."""
    fold, now = LineDeduplicator(), 0.0
    waiting = 0
    for rank, stream, lines, later, _ in chunks:
        now += later
        fold.feed(rank, stream, lines, now)
        waiting += len(lines)
        waiting -= sum(len(one.ranks) for one in fold.drain(frozenset(range(4)), now))
    assert waiting == sum(len(one.ranks) for one in fold.drain(frozenset(range(4)), now + 1.01 * MAX_WAIT_S))
