"""How many samples of a batch each rank computes, from the ranks' speeds and bounds. No clock and no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from gpu_launch.errors import UsageError


def check_speeds(speeds: Sequence[float], ranks: int) -> tuple[float, ...]:
    """Return the speeds of all ranks as numbers; only their ratios matter, and a rank with 0 gets no samples.

    Raises:
        UsageError: there is not one for each rank, one is negative or not finite, or all are 0.
    """
    values = tuple(float(speed) for speed in speeds)
    if len(values) != ranks:
        raise UsageError(f"speeds has {len(values)} values, and there are {ranks} ranks: give one for each rank")
    for rank, speed in enumerate(values):
        if not math.isfinite(speed) or speed < 0:
            raise UsageError(f"the speed of rank {rank} is {speed:g}: give a positive number, or 0 for no samples")
    if not any(values):
        raise UsageError("the speeds of all ranks are 0, so no rank would compute anything: give one a positive number")
    return values


def find_bound(most: int | Sequence[int] | None, *, rank: int, ranks: int, batch: int) -> int:
    """Return the largest share of this rank, in samples: its own number, its place in those of all ranks, or `batch`.

    Raises:
        UsageError: there is not one for each rank, or it is not a whole number of 0 or more.
    """
    if most is None:
        return batch
    if isinstance(most, Sequence) and len(most) != ranks:
        raise UsageError(f"most has {len(most)} values, and there are {ranks} ranks: give one for each rank")
    bound = most[rank] if isinstance(most, Sequence) else most
    if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
        raise UsageError(f"most of rank {rank} is {bound!r}: give a whole number of samples, 0 or more")
    return bound


def check_room(bounds: Sequence[int], speeds: Sequence[float], batch: int) -> None:
    """Refuse bounds that leave no room for a whole batch. Ranks with speed 0 take nothing.

    Raises:
        UsageError: all ranks together take fewer samples than a batch has.
    """
    room = sum(bound for bound, speed in zip(bounds, speeds, strict=True) if speed)
    if room < batch:
        raise UsageError(
            f"the ranks take at most {room} samples together (most by rank: {_join(bounds)}; speeds: "
            f"{_join(f'{speed:g}' for speed in speeds)}), {batch - room} fewer than the batch of {batch}: raise most, "
            f"or choose a batch of {room} or less and accumulate gradients"
        )


def split_batch(samples: int, speeds: Sequence[float], most: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return each rank's share of a batch: whole numbers in proportion to the speeds that add up to `samples`.

    What is left after rounding down goes to ranks without a sample, the fastest first, since each computes one in any
    case; then, one by one, to the rank that ends first with one more. So no other shares let the last rank end earlier.
    Between equal ranks the lower one is first. A rank whose share would be above its bound gets its bound, and the
    others divide the rest in proportion.

    The sums are exact, so ranks with equal arguments get equal shares.
    """
    exact = [Fraction(speed) for speed in speeds]
    shares = [0] * len(exact)
    open_ranks = [rank for rank, speed in enumerate(exact) if speed]
    left = samples
    while True:
        total = sum(exact[rank] for rank in open_ranks)
        quotas = {rank: left * exact[rank] / total for rank in open_ranks}
        bounded = [rank for rank in open_ranks if most is not None and quotas[rank] > most[rank]]
        if most is None or not bounded:
            break
        for rank in bounded:
            shares[rank] = most[rank]
        left = samples - sum(shares)
        open_ranks = [rank for rank in open_ranks if rank not in bounded]
    for rank, quota in quotas.items():
        shares[rank] = math.floor(quota)
    for _ in range(samples - sum(shares)):
        free = (rank for rank in quotas if most is None or shares[rank] < most[rank])
        shares[min(free, key=lambda rank: (shares[rank] > 0, (shares[rank] + 1) / exact[rank]))] += 1
    return tuple(shares)


def update_speeds(known: Sequence[float], measured: Sequence[float | None]) -> tuple[float, ...]:
    """Return the measured speeds; a rank without one keeps its known speed in proportion to those that have both.

    The two may have different units: known speeds can be those of a matrix product, measured ones samples per second.
    """
    pairs = [(old, new) for old, new in zip(known, measured, strict=True) if new is not None]
    before = sum(old for old, _ in pairs)
    if not before:
        return tuple(known)
    factor = sum(new for _, new in pairs) / before
    return tuple(old * factor if new is None else new for old, new in zip(known, measured, strict=True))


def compute_gain(shares: Sequence[int], changed: Sequence[int], speeds: Sequence[float]) -> float:
    """Return by which factor a step becomes shorter when `shares` change to `changed`, at these speeds."""
    return _longest(shares, speeds) / _longest(changed, speeds)


def _longest(shares: Sequence[int], speeds: Sequence[float]) -> float:
    """Return how long the last rank computes."""
    return max(share / speed for share, speed in zip(shares, speeds, strict=True) if share)


def _join(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
