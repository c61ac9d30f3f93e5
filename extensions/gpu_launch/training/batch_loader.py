"""The DataLoader of `gpu_launch.balance`, from which its sampler learns what becomes of the batches that it drew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from gpu_launch.training.sampler import BalancedSampler


class BatchLoader(DataLoader):  # type: ignore[misc] # torch is Any where types are checked
    """A DataLoader over the batches of a `BalancedSampler`."""

    batch_sampler: BalancedSampler

    def __iter__(self) -> Iterator[Any]:
        # Here, because an error in the sampler leaves torch's iterator half built.
        self.batch_sampler.check_steps()
        batches = super().__iter__()
        self.batch_sampler.has_loader = True
        return _Batches(batches, self.batch_sampler)


class _Batches:
    """The batches of an epoch."""

    def __init__(self, batches: Iterator[Any], sampler: BalancedSampler) -> None:
        self._batches, self._sampler = batches, sampler

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._sampler.is_given = True
            raise
