"""The time of a training step on some cards, from a profile on one card and a bench. No clock and no torch.

Each rank computes the same number of samples as the profiled one. DDP sends a bucket of gradients when its last
gradient is there and the bucket before it has been sent; what is not sent at the last gradient extends the step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpu_launch.prediction.figures import Bench, Network, StepProfile
from gpu_launch.training.comm_modes import PERIODS, CommMode

#: Speeds of two cards that differ by less than this factor count as equal: measured ones vary.
_EQUAL_SPEED = 1.25
#: All sets of cards are compared up to this number of cards; of more, the fastest ones of each number.
_MOST_CARDS = 10
#: All-reduces of one bucket, one after another.
_CALLS = {CommMode.EXACT: 1, CommMode.BF16: 1, CommMode.POWERSGD: 3}
#: The modes that `--comm auto` may choose, those that change less first, and the factor by which a later one must be
#: better.
_AUTOMATIC = (CommMode.EXACT, CommMode.BF16, CommMode.POWERSGD)
_WORTH = 1.1


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """The parts of a step, in seconds; the step is the sum of all but `overlapped_s`."""

    #: Ranks of the bench.
    cards: tuple[int, ...]
    mode: CommMode
    input_s: float
    compute_s: float
    compress_s: float
    #: Communication next to the computation, and what remains of it after the last gradient.
    overlapped_s: float
    exposed_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.input_s + self.compute_s + self.compress_s + self.exposed_s + self.update_s

    @property
    def rate(self) -> float:
        """The batches of one card that all cards together compute in a second."""
        return len(self.cards) / self.step_s


def compute_allreduce_s(network: Network, ranks: int, size: float, *, bf16: bool = False) -> float:
    """Return the time of a ring all-reduce: each rank sends 2 (n - 1) / n of the bytes, in 2 (n - 1) turns."""
    bytes_s = network.bf16_bytes_s if bf16 else network.bytes_s
    return 2 * (ranks - 1) * network.latency_s + 2 * (ranks - 1) / ranks * size / bytes_s


def find_network(bench: Bench, cards: Sequence[int]) -> Network:
    """Return the network of some ranks: a ring is as slow as its slowest link.

    What was measured with all ranks together counts for all of them. Links that were not measured are taken to be like
    the slowest measured one.
    """
    if len(cards) == len(bench.cards) > 2 and bench.gang is not None:
        return bench.gang
    own = [link.network for link in bench.links if set(link.ranks) <= set(cards)]
    networks = own if len(own) == math.comb(len(cards), 2) else [link.network for link in bench.links]
    return Network(
        latency_s=max(network.latency_s for network in networks),
        bytes_s=min(network.bytes_s for network in networks),
        bf16_bytes_s=min(network.bf16_bytes_s for network in networks),
    )


def predict_step(profile: StepProfile, bench: Bench, cards: Sequence[int], mode: CommMode) -> StepPrediction:
    """Return the parts of a step on these ranks of the bench."""
    slowdown = max(_compute_slowdown(profile, bench, card) for card in cards)
    compute_s, ranks = profile.compute_s * slowdown, len(cards)
    compress_s = communication_s = exposed_s = 0.0
    if ranks > 1:
        network = find_network(bench, cards)
        if mode in PERIODS:
            averaging_s = compute_allreduce_s(network, ranks, profile.parameter_bytes)
            communication_s = exposed_s = averaging_s / PERIODS[mode]
        else:
            compress_s = profile.compress_s.get(mode, 0.0) * slowdown
            end_s, communication_s = _send_buckets(
                profile, network, ranks, mode=mode, slowdown=slowdown, compress_s=compress_s
            )
            exposed_s = max(0.0, end_s - compute_s - compress_s)
    return StepPrediction(
        cards=tuple(cards),
        mode=mode,
        input_s=profile.input_s,
        compute_s=compute_s,
        compress_s=compress_s,
        overlapped_s=max(0.0, communication_s - exposed_s),
        exposed_s=exposed_s,
        update_s=profile.update_s * slowdown,
    )


def _send_buckets(
    profile: StepProfile, network: Network, ranks: int, *, mode: CommMode, slowdown: float, compress_s: float
) -> tuple[float, float]:
    """Return when the last bucket has been sent, from the begin of the forward pass, and the time of all sending."""
    whole = sum(bucket.sizes[CommMode.EXACT] for bucket in profile.buckets)
    end_s = sum_s = compressed = 0.0
    for bucket in profile.buckets:
        compressed += bucket.sizes[CommMode.EXACT]
        ready_s = bucket.ready_s * slowdown + compress_s * compressed / whole
        size, calls = bucket.sizes[mode], _CALLS[mode]
        send_s = calls * compute_allreduce_s(network, ranks, size / calls, bf16=mode is CommMode.BF16)
        end_s = max(ready_s, end_s) + send_s
        sum_s += send_s
    return end_s, sum_s


def _compute_slowdown(profile: StepProfile, bench: Bench, card: int) -> float:
    """Return how many times as long a card computes as the profiled one, with the bench's speed of that one."""
    own = profile.card
    seen = [other.flops for other in bench.cards if (other.node, other.device) == (own.node, own.device)]
    ratio = (max(seen) if seen else own.flops) / bench.cards[card].flops
    return 1.0 if 1 / _EQUAL_SPEED < ratio < _EQUAL_SPEED else ratio


def list_fitting_cards(profile: StepProfile, bench: Bench) -> tuple[int, ...]:
    """Return the ranks of the bench whose cards have the memory that the script used."""
    return tuple(rank for rank, card in enumerate(bench.cards) if card.memory_mib >= profile.peak_memory_mib)


def predict_all(profile: StepProfile, bench: Bench) -> list[StepPrediction]:
    """Return the best set of each number of cards, in each mode; none if the model fits no card."""
    fitting = list_fitting_cards(profile, bench)
    found = []
    for number in range(1, len(fitting) + 1):
        sets = list(_list_sets(bench, fitting, number))
        for mode in CommMode if number > 1 else (CommMode.EXACT,):
            found.append(
                min((predict_step(profile, bench, cards, mode) for cards in sets), key=lambda step: step.step_s)
            )
    return found


def _list_sets(bench: Bench, cards: Sequence[int], number: int) -> Iterable[tuple[int, ...]]:
    if len(cards) <= _MOST_CARDS:
        return itertools.combinations(cards, number)
    fastest = sorted(cards, key=lambda card: -bench.cards[card].flops)
    return [tuple(sorted(fastest[:number]))]


def choose_mode(steps: Iterable[StepPrediction], ranks: int) -> CommMode | None:
    """Return the mode of `--comm auto`: the one that changes least, unless another is faster by more than a tenth.

    `local` and `diloco` are never chosen, because the ranks' models differ with them. None if no step of this number of
    ranks was predicted.
    """
    by_mode = {step.mode: step.step_s for step in steps if len(step.cards) == ranks}
    if ranks == 1 and by_mode:
        return CommMode.EXACT
    chosen: CommMode | None = None
    for mode in _AUTOMATIC:
        if mode in by_mode and (chosen is None or by_mode[mode] * _WORTH < by_mode[chosen]):
            chosen = mode
    return chosen
