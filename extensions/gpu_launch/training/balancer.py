"""`gpu_launch.balance`: shares of each batch by the ranks' speed, and the loss scale that keeps the gradient exact."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gpu_launch.errors import UsageError
from gpu_launch.training import shares, speed
from gpu_launch.training.sampler import BalancedSampler, build_sample_order, check_whole_batch

#: Shares change only if that makes a step shorter by this factor: medians of measured times vary by a percent.
LEAST_GAIN = 1.02
#: Values that must be equal on all ranks, so that they cut the same batches from the same order.
_EQUAL = ("the number of samples", "batch", "seed", "shuffle", "drop_last")


@dataclass(frozen=True)
class BalancedStep:
    """One step of this rank: multiply its mean loss by `scale` before `backward()`."""

    #: Samples of this rank; 0 where it got one sample only to take part in collectives.
    samples: int
    #: Samples of all ranks.
    batch: int
    #: Number of ranks × samples / batch, so that the mean over the ranks is the mean over the batch.
    scale: float


class BatchBalancer:
    """What `gpu_launch.balance` returns, see there."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch: int,
        speeds: Sequence[float] | None,
        most: int | Sequence[int] | None,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        sampler: Any,
        model: Any,
        rebalance_every: int | None,
        device: Any,
        group: Any,
    ) -> None:
        #: `loader` was called, so that all batches are to come from it.
        self._has_loader = False
        order = build_sample_order(dataset, batch=batch, sampler=sampler, shuffle=shuffle, seed=seed)
        if drop_last:
            check_whole_batch(len(order), batch)
        if rebalance_every is not None and rebalance_every < 1:
            raise UsageError(f"rebalance_every is {rebalance_every}: give a number of steps, 1 or more, or None")
        self._dataset, self._rebalance_every, self._steps = dataset, rebalance_every, 0
        self._ranks = RankGroup(group)
        rank, size = self._ranks.rank, self._ranks.size
        known = None if speeds is None else shares.check_speeds(speeds, size)
        bound = shares.find_bound(most, rank=rank, ranks=size, batch=batch)
        target = _find_device(device)
        own_speed = speed.measure_speed(target) if known is None else known[rank]
        rows = self._ranks.gather((own_speed, bound, len(order), batch, seed, shuffle, drop_last))
        _check_equal({name: [row[2 + column] for row in rows] for column, name in enumerate(_EQUAL)})
        known = shares.check_speeds([row[0] for row in rows], size)
        bounds = [int(row[1]) for row in rows]
        shares.check_room(bounds, known, batch)
        self._clock = speed.StepClock(target, model)
        #: Argument of `DataLoader(dataset, batch_sampler=balanced.sampler)`.
        self.sampler = BalancedSampler(order, rank=rank, batch=batch, speeds=known, most=bounds, drop_last=drop_last)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in a whole batch; they add up to the batch."""
        return self.sampler.shares

    @property
    def speeds(self) -> tuple[float, ...]:
        """The last known speed of each rank; only the ratios mean something."""
        return self.sampler.speeds

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch; call it before each epoch, with the same number on every rank."""
        self.sampler.set_epoch(epoch)

    def loader(self, **options: Any) -> Any:
        """Return a `torch.utils.data.DataLoader` over the data set with this rank's samples of each batch.

        The options are DataLoader's, such as `num_workers`. It has `set_epoch` as well.
        """
        from gpu_launch.training.batch_loader import BatchLoader

        self._has_loader = True
        loader: Any = BatchLoader(self._dataset, batch_sampler=self.sampler, **options)
        loader.set_epoch = self.set_epoch
        return loader

    def trainer_loader(self, **options: Any) -> Any:
        """Return `loader(...)` for trainers that divide the loss by the items of all ranks, such as transformers'.

        They weigh the ranks themselves and must not use `step()`.

        Raises:
            UsageError: a rank would have no sample of a batch. The sample that it gets instead would be counted twice.
        """
        if self.sampler.has_empty_share():
            raise UsageError(
                f"a rank has no sample in some batch (shares of a whole batch: {self.shares}), and a trainer that "
                "counts items would count the sample that the rank gets instead: choose a larger batch, or "
                "drop_last=True"
            )
        return self.loader(**options)

    @contextmanager
    def step(self) -> Iterator[BalancedStep]:
        """Give the loss scale of the next batch, and measure how long this rank computes.

        Call it once for each batch that the DataLoader gives, in their order, on all ranks. With `rebalance_every`,
        `rebalance()` is called at the beginning of each such step.

        The time of a step begins here. With `model`, it ends when the last gradient of the step has been computed,
        which may be after the `with` block. Without, it ends with the block, which then must not wait for other ranks:
        put forward into it, and backward behind it.

        Raises:
            UsageError: more steps than batches were drawn, or another DataLoader than that of `loader` drew them.
        """
        if self._rebalance_every and self._steps and self._steps % self._rebalance_every == 0:
            self.rebalance()
        share = self.sampler.pop_share()
        if self._has_loader and not self.sampler.has_loader:
            raise UsageError(
                "the batches come from another DataLoader, which may leave some of them out, as those of accelerate's "
                "prepare() and skip_first_batches() do: take them from balanced.loader() itself, and call "
                "balanced.sampler.pop_share() for each one that is passed over"
            )
        self._steps += 1
        self._clock.start(share.samples)
        yield BalancedStep(share.samples, share.batch, self._ranks.size * share.samples / share.batch)
        self._clock.end_body()

    def rebalance(self) -> bool:
        """Adapt the shares to the times of the steps since the last call; return whether they change.

        All ranks must call it after the same step: it has one all_gather. They change only if a step becomes shorter by
        more than 2 % by it. A rank that was not timed (its share was empty, or there were fewer than three steps after
        the first three) keeps its speed in relation to the others.

        A change counts from the first batch that no rank's DataLoader has drawn yet.
        """
        own = self._clock.read_speed()
        rows = self._ranks.gather((own or 0.0, float(self.sampler.drawn)))
        speeds = shares.update_speeds(self.speeds, [value or None for value, _ in rows])
        batch = sum(self.shares)
        if shares.compute_gain(self.shares, self.sampler.split(batch, speeds), speeds) <= LEAST_GAIN:
            return False
        self.sampler.change_speeds(speeds, first_batch=int(max(drawn for _, drawn in rows)))
        return True


class RankGroup:
    """The ranks of a process group of torch.distributed; one rank, where there is none."""

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self._group = group
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        elif int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise UsageError(
                f"this is one of {os.environ['WORLD_SIZE']} ranks, and they do not know each other yet: call "
                "torch.distributed.init_process_group() before gpu_launch.balance"
            )

    def gather(self, row: Sequence[float]) -> list[tuple[float, ...]]:
        """Return the numbers of all ranks, by one all_gather, which all ranks must call."""
        if self.size == 1:
            return [tuple(row)]
        import torch
        import torch.distributed as dist

        device = torch.device("cuda" if "nccl" in dist.get_backend(self._group) else "cpu")
        own = torch.tensor(row, dtype=torch.float64, device=device)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own, group=self._group)
        return [tuple(part.tolist()) for part in parts]


def _check_equal(settings: Mapping[str, Sequence[float]]) -> None:
    """Refuse settings, by rank, that differ. All ranks see the same, so all of them refuse.

    Raises:
        UsageError: the first setting that differs.
    """
    for name, values in settings.items():
        if len(set(values)) > 1:
            by_rank = ", ".join(f"{value:.15g}" for value in values)
            raise UsageError(f"{name} differs between the ranks ({by_rank}): give all of them the same")


def _find_device(device: Any) -> Any:
    """Return the given device, else the current GPU, else the CPU."""
    import torch

    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
