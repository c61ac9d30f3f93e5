"""Fine-tuning of a causal language model: one card or several, with checkpoints and metrics."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpu_launch.errors import UsageError
from gpu_launch.recipes.causal_model import Device, build_model, compute_loss
from gpu_launch.recipes.run_record import RunRecord, write_line
from gpu_launch.recipes.text_data import build_sequences, load_codec, split_held_out
from gpu_launch.report import report

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """What is trained, and how."""

    model: Path
    data: Path
    #: `lora`, `qlora` or `full`.
    method: str = "lora"
    epochs: float = 1.0
    #: Maximum number of steps; 0 for all epochs.
    steps: int = 0
    #: Sequences of each rank in a step, and their tokens.
    batch: int = 4
    sequence: int = 512
    rate: float = 2e-4
    #: Rank of LoRA's matrices.
    adapter_rank: int = 16
    #: Steps between two evaluations, each with a checkpoint.
    every: int = 20
    #: Share of the sequences that is not trained on.
    held_out: float = 0.1
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a training ended with."""

    steps: int
    #: Mean loss of the last steps up to the last evaluation, and on held-out sequences; None without those.
    loss: float
    held_out_loss: float | None
    #: Tokens that all ranks trained on, for each second.
    tokens_per_s: float
    #: The training was asked to end before its last step; its checkpoint continues it.
    is_interrupted: bool


class Trainer:
    """One training. All ranks of the process group make one; without a group there is one rank.

    Args:
        settings: What is trained, and how.
        folder: Folder for metrics, chart and checkpoint.
        on_evaluation: Called in every rank with the step and the loss; an exception of it ends the training.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        folder: Path,
        on_evaluation: Callable[[int, float], None] = lambda step, loss: None,
    ) -> None:
        self._settings, self._folder, self._on_evaluation = settings, folder, on_evaluation
        self._device = Device.find()
        self._record = RunRecord(folder)
        self._is_told_to_end = False
        torch.manual_seed(settings.seed)
        self.model = build_model(
            settings.model, self._device, method=settings.method, adapter_rank=settings.adapter_rank
        )
        codec = load_codec(settings.model, self.model.config.vocab_size)
        sequences = build_sequences(settings.data, codec, settings.sequence)
        self._training, self._held_out = split_held_out(sequences, settings.held_out)
        self._steps_each = len(self._training) // (settings.batch * self._device.world)
        if not self._steps_each:
            raise UsageError(
                f"The data has {len(self._training)} sequences to train on, fewer than batch × GPUs = "
                f"{settings.batch} × {self._device.world}: set a smaller batch or a shorter sequence."
            )
        all_epochs = self._steps_each * settings.epochs
        self._steps = math.ceil(min(settings.steps, all_epochs) if settings.steps else all_epochs)
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=settings.rate)

    def train(self) -> TrainingResult:
        """Train up to the last step, or until SIGTERM, from the checkpoint of an earlier start if there is one."""
        earlier = signal.signal(signal.SIGTERM, self._note_end)
        try:
            return self._train()
        finally:
            signal.signal(signal.SIGTERM, earlier)

    def _train(self) -> TrainingResult:
        first = self._load()
        net = self._join() if dist.is_initialized() else self.model
        losses: list[float] = []
        loss, evaluated, speed = self._read_last()
        began, tokens = time.monotonic(), 0
        for step in range(first, self._steps):
            self._optimizer.zero_grad()
            batch = self._build_batch(step)
            step_loss = compute_loss(net, batch, self._device)
            step_loss.backward()
            self._optimizer.step()
            losses.append(step_loss.item())
            tokens += batch.numel() * self._device.world
            # All ranks end at the same step.
            ended = self._device.sum(float(self._is_told_to_end)) > 0
            is_last = step + 1 == self._steps
            if is_last or ended or (step + 1) % self._settings.every == 0:
                loss = self._device.sum(sum(losses) / len(losses)) / self._device.world
                is_interrupted = ended and not is_last
                if not is_last:
                    # An evaluation can take longer than the time that a SIGTERM leaves.
                    self._save(step + 1)
                evaluated = math.nan if is_interrupted else self._evaluate()
                speed = tokens / max(time.monotonic() - began, 1e-9)
                self._note(step + 1, loss, evaluated, speed)
                if is_interrupted:
                    return self._build_result(step + 1, loss, evaluated, speed, is_interrupted=True)
                losses = []
                self._on_evaluation(step + 1, loss if math.isnan(evaluated) else evaluated)
                if is_last:
                    # With its result noted: a later start finds nothing to do, and reads it.
                    self._save(step + 1)
        return self._build_result(self._steps, loss, evaluated, speed)

    def _join(self) -> DistributedDataParallel:
        """Return the model of all ranks.

        DDP would send all weights from rank 0, but all ranks have read them from the same files. New ones are drawn
        from one seed, from which different models of cards draw different numbers.
        """
        for parameter in self._trained:
            dist.broadcast(parameter.data, 0)
        return DistributedDataParallel(self.model, init_sync=False)

    def _read_last(self) -> tuple[float, float, float]:
        """Return the last loss, that on held-out sequences, and the speed, of an earlier start; NaN and 0 for none."""
        metrics = self._record.read_metrics()
        last = metrics[-1] if metrics else {}
        return last.get("loss", math.nan), last.get("held_out_loss", math.nan), last.get("tokens_per_s", 0.0)

    def _build_batch(self, step: int) -> Any:
        """Return this rank's sequences of a step: all ranks shuffle alike in each epoch."""
        epoch, number = divmod(step, self._steps_each)
        generator = torch.Generator().manual_seed(self._settings.seed + epoch)
        order = torch.randperm(len(self._training), generator=generator)
        size = self._settings.batch * self._device.world
        chosen = order[number * size : (number + 1) * size][self._device.rank :: self._device.world]
        return self._training[chosen].to(self._device.torch)

    def _evaluate(self) -> float:
        """Return the mean loss on the held-out sequences; NaN without any."""
        if not len(self._held_out):
            return math.nan
        sums = [0.0, 0.0]
        self.model.eval()
        with torch.no_grad():
            for batch in self._held_out.split(self._settings.batch)[self._device.rank :: self._device.world]:
                sums[0] += compute_loss(self.model, batch.to(self._device.torch), self._device).item() * len(batch)
                sums[1] += len(batch)
        self.model.train()
        return self._device.sum(sums[0]) / self._device.sum(sums[1])

    def _note(self, step: int, loss: float, evaluated: float, speed: float) -> None:
        metrics: dict[str, Any] = {"loss": loss} | ({} if math.isnan(evaluated) else {"held_out_loss": evaluated})
        report(step, self._steps, **metrics)
        if self._device.rank == 0:
            epoch = step / self._steps_each
            self._record.append(step=step, epoch=epoch, **metrics, tokens_per_s=speed, rate=self._settings.rate)
            self._record.draw_losses()
            shown = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())
            write_line(f"step {step} of {self._steps}  {shown}  {speed:.0f} tokens/s")

    def _build_result(
        self, step: int, loss: float, evaluated: float, speed: float, *, is_interrupted: bool = False
    ) -> TrainingResult:
        return TrainingResult(
            steps=step,
            loss=loss,
            held_out_loss=None if math.isnan(evaluated) else evaluated,
            tokens_per_s=speed,
            is_interrupted=is_interrupted,
        )

    def _save(self, step: int) -> None:
        """Write the trained weights and the optimizer's state, as a whole; rank 0 alone."""
        if self._device.rank:
            return
        names = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        weights = {name: value for name, value in self.model.state_dict().items() if name in names}
        draft = self._folder / f".{CHECKPOINT}"
        torch.save({"step": step, "weights": weights, "optimizer": self._optimizer.state_dict()}, draft)
        draft.replace(self._folder / CHECKPOINT)

    def _load(self) -> int:
        """Return the number of steps that are done already, with their weights loaded."""
        path = self._folder / CHECKPOINT
        if not path.exists():
            return 0
        saved = torch.load(path, map_location=self._device.torch, weights_only=True)
        missing = self.model.load_state_dict(saved["weights"], strict=False).unexpected_keys
        if missing:
            raise UsageError(f"{path} is a checkpoint of another model or method: it has {missing[0]}.")
        self._optimizer.load_state_dict(saved["optimizer"])
        step = int(saved["step"])
        if self._device.rank == 0:
            self._record.continue_from(step)
            write_line(f"continues after step {step}")
        return step

    def _note_end(self, _number: int, _frame: FrameType | None) -> None:
        self._is_told_to_end = True
