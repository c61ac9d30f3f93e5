"""Three ranks with DDP and shares of different size compute what one process computes with whole batches."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import skip_first_batches

import gpu_launch
from gpu_launch.errors import UsageError
from gpu_launch.training import balancer
from tests.support.launch import balanced_training
from tests.support.launch.torchrun import run_ranks

pytestmark = pytest.mark.torch

RANKS = 3
#: Samples and epochs of each training, by its name.
TRAININGS = {
    "uneven": (50, 2),
    "empty shares": (7, 2),
    "bounded": (50, 2),
    "measured": (50, 1),
    "slow": (144, 2),
    "slow, not watched": (144, 1),
    "slow, every 8 steps": (437, 1),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each rank saved of each training, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(balanced_training.__name__, folder, RANKS)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(RANKS)]


def batches_of(results, name):
    """Return the samples of all ranks, by step."""
    return [list(itertools.chain(*parts)) for parts in zip(*(rank[name]["samples"] for rank in results), strict=True)]


@pytest.mark.parametrize("name", TRAININGS)
def test_gradients_and_parameters_are_those_of_one_process_with_whole_batches(results, name):
    """In every step, with uneven shares and last batches, ranks without samples, and shares that change."""
    balanced_training.check_against_one_process([rank[name] for rank in results])


@pytest.mark.parametrize("name", TRAININGS)
def test_every_sample_is_computed_once_in_an_epoch(results, name):
    """Also where shares change in an epoch, with a loader that is ahead of the training."""
    samples, epochs = TRAININGS[name]
    numbers = list(itertools.chain(*batches_of(results, name)))
    assert len(numbers) == samples * epochs
    for epoch in range(epochs):
        assert sorted(numbers[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def test_shares_are_in_proportion_to_the_speeds(results):
    """50 samples in batches of 18: the last one has 14."""
    sizes = [[len(part) for part in rank["uneven"]["samples"]] for rank in results]
    assert sizes == [[10, 10, 8] * 2, [5, 5, 4] * 2, [3, 3, 2] * 2]
    sizes = [[len(part) for part in rank["empty shares"]["samples"]] for rank in results]
    assert sizes == [[1, 1, 1, 1] * 2, [1, 1, 1, 0] * 2, [0, 0, 0, 0] * 2]
    # Each rank gave its own bound.
    assert results[0]["bounded"]["shares"][0] == (8, 6, 4)


def test_measured_shares_are_the_same_on_all_ranks(results):
    """One all_gather gives all of them the same speeds."""
    assert len({rank["measured"]["shares"][0] for rank in results}) == 1
    assert sum(results[0]["measured"]["shares"][0]) == 18


@pytest.mark.parametrize("name", ["slow", "slow, every 8 steps"])
def test_slower_rank_gets_a_smaller_share(results, name):
    """Its speed is simulated by a sleep for each sample. All ranks end a step together, so waits are not measured."""
    assert len({tuple(rank[name]["shares"]) for rank in results}) == 1
    assert results[0][name]["shares"][0] == (6, 6, 6)
    slow, *others = results[0][name]["shares"][-1]
    assert slow < 6 < min(others)


def test_slower_rank_is_found_without_the_model(results):
    """The time of the `with` block counts, which has no collective. Shares change once, at the end of the epoch."""
    assert [rank["slow, not watched"]["changed"] for rank in results] == [[True]] * RANKS


def test_different_settings_and_bounds_below_the_batch_are_refused_on_all_ranks(results):
    """No rank waits for one that has given up."""
    assert {rank["refused"]["batch"] for rank in results} == {
        "batch differs between the ranks (18, 19, 20): give all of them the same"
    }
    (text,) = {rank["refused"]["most"] for rank in results}
    assert "at most 15 samples together" in text
    assert "3 fewer than the batch of 18" in text


def test_one_process_gets_whole_batches():
    """A script for several ranks runs unchanged in a notebook."""
    balanced = gpu_launch.balance(balanced_training.build_data(), batch=18, device="cpu")
    assert [len(numbers) for numbers, *_ in balanced.loader()] == [18, 18, 14]
    with balanced.step() as step:
        assert (step.samples, step.batch, step.scale) == (18, 18, 1)
    assert balanced.rebalance() is False


def test_batches_that_another_loader_leaves_out_are_refused():
    """A step would get the scale of one of them, which differs at the end of an epoch."""
    balanced = gpu_launch.balance(balanced_training.build_data(), batch=18, device="cpu")
    loader = balanced.loader(num_workers=1)
    next(iter(skip_first_batches(loader, 1)))
    with pytest.raises(UsageError, match="the batches come from another DataLoader"), balanced.step():
        pass
    next(iter(loader))
    with balanced.step() as step:
        assert step.samples == 18


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_that_are_passed_over_must_be_counted(workers):
    """Otherwise the next epoch is refused; what a loop has not taken when it ends early, or without steps, is none."""
    balanced = gpu_launch.balance(balanced_training.build_data(), batch=18, device="cpu")
    loader = balanced.loader(num_workers=workers)

    def train(first: int, *, counted: bool = False, most: int = 9) -> list[tuple[int, int]]:
        sizes = []
        for number, (numbers, *_) in enumerate(loader):
            if number == most:
                break
            if number >= first:
                with balanced.step() as step:
                    sizes.append((len(numbers), step.samples))
            elif counted:
                balanced.sampler.pop_share()
        return sizes

    assert train(1, counted=True) == [(18, 18), (14, 14)]
    assert train(0, most=1) == [(18, 18)]
    assert train(9) == []
    train(1)
    with pytest.raises(UsageError, match=r"the last epoch had 3 batches, and 1 of them no balanced\.step\(\)"):
        train(0)
    assert train(0) == [(18, 18), (18, 18), (14, 14)]


def test_shares_follow_speeds_that_make_a_step_shorter_by_three_percent(monkeypatch):
    """Of 96 samples the slower rank computes 36, and the last rank ends after 36/35; with 35 it ends after 1."""

    def gather(row):
        return [row, (36.0, *row[1:])] if len(row) > 2 else [(61.0, row[1]), (35.0, row[1])]

    monkeypatch.setattr(balancer, "RankGroup", lambda _: SimpleNamespace(rank=0, size=2, gather=gather))
    balanced = gpu_launch.balance(range(960), batch=96, speeds=(60, 36), device="cpu")
    assert balanced.shares == (60, 36)
    assert balanced.rebalance()
    assert balanced.shares == (61, 35)
    assert not balanced.rebalance()


def test_trainers_that_count_items_get_no_empty_shares(results):
    """They would count the sample that a rank gets to take part in collectives."""
    assert {"a rank has no sample in some batch" in rank["refused"]["items"] for rank in results} == {True}
    assert "(1, 1, 0)" in results[0]["refused"]["items"]


def test_loader_has_the_epochs_of_its_sampler():
    """transformers' Trainer calls `set_epoch` of the loader."""
    loader = gpu_launch.balance(balanced_training.build_data(), batch=18, device="cpu").trainer_loader()
    orders = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        orders.append([numbers.tolist() for numbers, *_ in loader])
    assert orders[0] == orders[2] != orders[1]


def test_rank_without_a_process_group_is_refused(monkeypatch):
    """Otherwise each rank would compute all samples."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UsageError, match=r"one of 3 ranks.*init_process_group"):
        gpu_launch.balance(balanced_training.build_data(), batch=18)


def test_wrong_number_of_steps_between_rebalances_is_refused():
    """Before anything is measured."""
    with pytest.raises(UsageError, match="rebalance_every is 0"):
        gpu_launch.balance(balanced_training.build_data(), batch=18, rebalance_every=0)
