"""Batches of an epoch, cut into shares: every sample once, and the same number of batches on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_launch.errors import UsageError
from gpu_launch.training import sampler
from gpu_launch.training.sampler import BalancedSampler, SampleOrder


def build(samples, *, batch, speeds, drop_last=False, shuffle=True, seed=0):
    """Return the samplers of all ranks."""
    return [
        BalancedSampler(
            SampleOrder(samples, shuffle=shuffle, seed=seed), rank=rank, batch=batch, speeds=speeds, drop_last=drop_last
        )
        for rank in range(len(speeds))
    ]


def computed(batches, samplers):
    """Return the samples that count in each batch, of all ranks, from what their samplers gave."""
    return [
        [number for part, ranks in zip(parts, samplers, strict=True) for number in part[: ranks.pop_share().samples]]
        for parts in zip(*batches, strict=True)
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 200),
    st.integers(1, 40),
    st.lists(st.floats(0.01, 10), min_size=1, max_size=5),
    st.booleans(),
    st.integers(0, 3),
)
def test_every_sample_is_computed_once_in_an_epoch(samples, batch, speeds, shuffle, epoch):
    """Also where the last batch is uneven, and where a batch has fewer samples than there are ranks."""
    ranks = build(samples, batch=batch, speeds=speeds, shuffle=shuffle)
    for rank in ranks:
        rank.set_epoch(epoch)
    batches = [list(rank) for rank in ranks]
    assert all(len(drawn) == len(rank) == -(-samples // batch) for drawn, rank in zip(batches, ranks, strict=True))
    assert all(part for drawn in batches for part in drawn)
    whole = computed(batches, ranks)
    assert [len(numbers) for numbers in whole[:-1]] == [batch] * (len(whole) - 1)
    assert sorted(number for numbers in whole for number in numbers) == list(range(samples))


def test_order_depends_on_seed_and_epoch_only():
    """The same on every rank, in every process and in every version of Python."""
    assert list(SampleOrder(8, shuffle=True, seed=0)) == list(SampleOrder(8, shuffle=True, seed=0))
    orders = set()
    for seed in range(3):
        order = SampleOrder(30, shuffle=True, seed=seed)
        for epoch in range(3):
            order.set_epoch(epoch)
            orders.add(tuple(order))
    assert len(orders) == 9
    assert list(SampleOrder(4, shuffle=False, seed=5)) == [0, 1, 2, 3]


def test_batches_do_not_depend_on_the_speeds():
    """Shares decide who computes a sample, never with which others it is averaged."""
    even, uneven = build(50, batch=18, speeds=(1, 1, 1)), build(50, batch=18, speeds=(10, 5, 3))
    assert computed([list(rank) for rank in even], even) == computed([list(rank) for rank in uneven], uneven)


def test_rank_without_a_share_gets_the_first_sample_of_the_batch():
    """It is in the batch already, so it brings nothing into the step that is not there."""
    first, second, third = build(4, batch=2, speeds=(1, 1, 1), shuffle=False)
    assert [list(first), list(second), list(third)] == [[[0], [2]], [[1], [3]], [[0], [2]]]
    assert third.pop_share() == sampler.BatchShare(samples=0, batch=2)
    assert first.has_empty_share()
    assert not build(5, batch=3, speeds=(1, 1, 1), drop_last=True)[0].has_empty_share()
    assert build(5, batch=3, speeds=(1, 1, 1))[0].has_empty_share()


def test_drop_last_leaves_the_uneven_batch_out():
    """On all ranks."""
    ranks = build(50, batch=18, speeds=(10, 5, 3), drop_last=True)
    assert [[len(part) for part in rank] for rank in ranks] == [[10, 10], [5, 5], [3, 3]]
    assert [len(rank) for rank in ranks] == [2, 2, 2]


def test_changed_speeds_count_from_a_batch_that_no_rank_has_drawn():
    """One rank's loader is ahead of the other's; still every sample is computed once."""
    ranks = build(40, batch=4, speeds=(1, 1))
    iterators = [iter(rank) for rank in ranks]
    batches = [[next(iterators[0]) for _ in range(5)], [next(iterators[1]) for _ in range(2)]]
    for rank in ranks:
        rank.change_speeds((3, 1), first_batch=max(rank.drawn for rank in ranks))
    for drawn, iterator in zip(batches, iterators, strict=True):
        drawn.extend(iterator)
    assert [len(part) for part in batches[0]] == [2] * 5 + [3] * 5
    assert sorted(number for numbers in computed(batches, ranks) for number in numbers) == list(range(40))
    # The next epoch begins with the new shares.
    assert [len(part) for part in ranks[1]] == [1] * 10


def test_new_epoch_forgets_shares_that_no_step_took():
    """A loop that is left early does not shift the shares of the next epoch."""
    (rank,) = build(5, batch=3, speeds=(1,))
    iterator = iter(rank)
    next(iterator)
    assert [len(part) for part in rank] == [3, 2]
    assert [rank.pop_share().samples for _ in range(2)] == [3, 2]
    with pytest.raises(UsageError, match="more steps than batches"):
        rank.pop_share()


class Order:
    """An order of a caller's own, with or without `set_epoch`."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __iter__(self):
        return iter(self.numbers)


class EpochOrder(Order):
    """The same with `set_epoch`."""

    def set_epoch(self, epoch):
        self.numbers = self.numbers[epoch:] + self.numbers[:epoch]


class DividedOrder(EpochOrder):
    """A part for each rank, as torch's DistributedSampler gives it."""

    num_replicas = 2


def test_order_of_the_caller_is_kept():
    """Its `set_epoch` is called for it."""
    order = sampler.build_sample_order([], batch=2, sampler=EpochOrder([4, 2, 0]), shuffle=True, seed=0)
    rank = BalancedSampler(order, rank=0, batch=2, speeds=(1,))
    rank.set_epoch(1)
    assert list(rank) == [[2, 0], [4]]


@pytest.mark.parametrize(
    ("dataset", "batch", "order", "text"),
    [
        ([1], 0, None, "batch is 0"),
        ([1], 2.5, None, "batch is 2.5"),
        ([1], True, None, "batch is True"),
        ([], 4, None, "the data set is empty"),
        (iter([1]), 4, None, r"the data set \(list_iterator\) has no length"),
        ([1], 4, EpochOrder([]), "the sampler is empty"),
        ([1], 4, iter([1]), r"the sampler \(list_iterator\) has no length"),
        ([1], 4, Order([1]), r"the sampler \(Order\) has no set_epoch"),
        ([1], 4, DividedOrder([1]), r"the sampler \(DividedOrder\) gives each of 2 ranks a part of its own"),
    ],
)
def test_wrong_data_is_refused(dataset, batch, order, text):
    """Before any rank computes."""
    with pytest.raises(UsageError, match=text):
        sampler.build_sample_order(dataset, batch=batch, sampler=order, shuffle=True, seed=0)


def test_drop_last_of_everything_is_refused():
    """Fewer samples than one batch."""
    sampler.check_whole_batch(8, 8)
    with pytest.raises(UsageError, match="drop_last leaves nothing of 5 samples in batches of 8"):
        sampler.check_whole_batch(5, 8)
