"""Which samples each rank computes: the order of an epoch, cut into batches, and each batch into shares. No torch."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpu_launch.errors import UsageError
from gpu_launch.training import shares


class EpochSampler(Protocol):
    """An order of all samples for each epoch, equal on all ranks."""

    def __iter__(self) -> Iterator[int]: ...
    def __len__(self) -> int: ...
    def set_epoch(self, epoch: int) -> None: ...


class SampleOrder:
    """The numbers below `samples`, shuffled by seed and epoch, or in order."""

    def __init__(self, samples: int, *, shuffle: bool, seed: int) -> None:
        self._samples, self._shuffle, self._seed, self._epoch = samples, shuffle, seed, 0

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._samples))
        if self._shuffle:
            # Text as the seed gives the same order in every process and Python version.
            random.Random(f"{self._seed} {self._epoch}").shuffle(order)  # noqa: S311 - no secret
        return iter(order)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self._epoch = epoch


@dataclass(frozen=True)
class BatchShare:
    """This rank's part of one batch of all ranks; `samples` is 0 where it got one sample only to take part."""

    samples: int
    batch: int


class BalancedSampler:
    """This rank's samples of each batch, for `torch.utils.data.DataLoader(dataset, batch_sampler=...)`.

    Batches are cut from the order of the epoch, equally on all ranks; then each rank takes its share of every batch. So
    every sample is computed once in an epoch, whatever the speeds are, and all ranks have the same number of batches.

    A rank whose share is empty gets the first sample of the batch instead, so that it takes part in collectives. Its
    loss has the weight 0, see `BatchBalancer.step`.
    """

    def __init__(
        self,
        sampler: EpochSampler,
        *,
        rank: int,
        batch: int,
        speeds: Sequence[float],
        most: Sequence[int] | None = None,
        drop_last: bool = False,
    ) -> None:
        #: The order of samples; Lightning and accelerate call its `set_epoch` themselves.
        self.sampler = sampler
        self._rank, self._batch, self._most, self._drop_last = rank, batch, most, drop_last
        #: Speeds of all ranks, and the batch of this epoch from which they count, in ascending order.
        self._speeds: list[tuple[int, tuple[float, ...]]] = [(0, tuple(speeds))]
        #: Batches of this epoch that a DataLoader has taken, which can be ahead of the training.
        self.drawn = 0
        self._unused: deque[BatchShare] = deque()
        #: The batches of this epoch go to a `BatchLoader`; it has given all of them to the training.
        self.has_loader = self.is_given = False

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self._batch)
        return whole + (1 if rest and not self._drop_last else 0)

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator: an epoch begins when a DataLoader asks for its batches, before it takes the first one.
        self._speeds = [(0, self.speeds)]
        self.drawn = 0
        self._unused = deque()
        self.has_loader = self.is_given = False
        order = list(self.sampler)
        return (self._draw(order[start : start + self._batch]) for start in self._starts())

    @property
    def speeds(self) -> tuple[float, ...]:
        """The last known speeds of all ranks, in any unit."""
        return self._speeds[-1][1]

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in a whole batch, at the last known speeds."""
        return self.split(self._batch, self.speeds)

    def split(self, samples: int, speeds: Sequence[float]) -> tuple[int, ...]:
        """Return each rank's share of a batch of this size at these speeds."""
        return shares.split_batch(samples, speeds, self._most)

    def has_empty_share(self) -> bool:
        """Return whether a rank gets no sample of a whole batch or of the last one, at the last known speeds."""
        rest = 0 if self._drop_last else len(self.sampler) % self._batch
        return any(0 in self.split(samples, self.speeds) for samples in (self._batch, rest) if samples)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; call it with the same number on every rank."""
        self.sampler.set_epoch(epoch)

    def change_speeds(self, speeds: Sequence[float], first_batch: int) -> None:
        """Use other speeds from this batch of the epoch on, which no rank may have drawn yet."""
        self._speeds.append((first_batch, tuple(speeds)))

    def pop_share(self) -> BatchShare:
        """Return the share of the batch that the training has reached: one for each batch drawn, in their order.

        Raises:
            UsageError: the training has taken the shares of all batches that were drawn.
        """
        if not self._unused:
            raise UsageError(
                "there are more steps than batches: call balanced.step() once for each batch that the DataLoader with "
                "balanced.sampler gives, in this process"
            )
        return self._unused.popleft()

    def check_steps(self) -> None:
        """Refuse to continue after an epoch that was given as a whole, if only some of its batches were trained on.

        Raises:
            UsageError: once, if there were steps, and fewer than batches.
        """
        missed, is_given = len(self._unused), self.is_given
        self.is_given = False
        if is_given and 0 < missed < self.drawn:
            raise UsageError(
                f"the last epoch had {self.drawn} batches, and {missed} of them no balanced.step(), so that later "
                "steps had the scale of an earlier batch. Call it once for each batch, in their order; for one that is "
                "passed over, call balanced.sampler.pop_share()"
            )

    def _starts(self) -> range:
        return range(0, len(self) * self._batch, self._batch)

    def _draw(self, batch: list[int]) -> list[int]:
        speeds = next(speeds for first, speeds in reversed(self._speeds) if first <= self.drawn)
        parts = self.split(len(batch), speeds)
        start, size = sum(parts[: self._rank]), parts[self._rank]
        self.drawn += 1
        self._unused.append(BatchShare(size, len(batch)))
        return batch[start : start + size] or batch[:1]


def build_sample_order(dataset: Any, *, batch: int, sampler: Any, shuffle: bool, seed: int) -> EpochSampler:
    """Return the order of samples: the caller's sampler, or one of all samples of the data set.

    Raises:
        UsageError: the batch is not a positive number; the data set has no length, or no samples; the sampler has no
            length or no `set_epoch`, or divides the samples between ranks.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise UsageError(f"batch is {batch!r}: give the number of samples of all ranks together, 1 or more")
    source, name = (dataset, "the data set") if sampler is None else (sampler, "the sampler")
    if not hasattr(source, "__len__"):
        raise UsageError(
            f"{name} ({type(source).__name__}) has no length: shares need one whose samples have numbers and a length"
        )
    if not len(source):
        raise UsageError(f"{name} is empty: there is nothing to train on")
    if sampler is None:
        return SampleOrder(len(source), shuffle=shuffle, seed=seed)
    if not callable(getattr(sampler, "set_epoch", None)):
        raise UsageError(
            f"the sampler ({type(sampler).__name__}) has no set_epoch(epoch): without it, ranks can have different "
            "orders and would compute some samples twice and others never. Give it one that sets the seed of its order"
        )
    if (parts := getattr(sampler, "num_replicas", 1)) != 1:
        raise UsageError(
            f"the sampler ({type(sampler).__name__}) gives each of {parts} ranks a part of its own, and balance "
            "divides the samples itself: give it one with the same order of all samples on every rank, or none"
        )
    order: EpochSampler = sampler
    return order


def check_whole_batch(samples: int, batch: int) -> None:
    """Refuse `drop_last` where it would leave nothing.

    Raises:
        UsageError: there are fewer samples than one batch has.
    """
    if samples < batch:
        raise UsageError(
            f"drop_last leaves nothing of {samples} samples in batches of {batch}: choose a batch of {samples} or "
            "less, or drop_last=False"
        )
