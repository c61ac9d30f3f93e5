"""The stages of a model as ranks of torch.distributed: steps go from rank 0 to the last one, tokens from there back.

Numbers travel over gloo, hidden states over NCCL where the ranks have GPUs. A rank that fails breaks the connections of
its neighbours, and so ends all.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from gpu_launch.serving import steps
from gpu_launch.serving.stage import Stage
from gpu_launch.serving.steps import Step

#: Timeout of calls between ranks: one of them may load its weights while the others wait.
GROUP_TIMEOUT = timedelta(hours=1)
#: Rank 0 lets the others know that it is there, seconds.
HEARTBEAT_S = 30.0
_STEP, _NOTHING, _STOP = 0, 1, 2


class Pipeline:
    """A rank's stage with its neighbours."""

    def __init__(self, stage: Stage, *, rank: int, ranks: int, slots: int, device: torch.device) -> None:
        self._stage, self._rank, self._ranks, self._device = stage, rank, ranks, device
        self._numbers = 1 + steps.count_numbers(slots)

    @property
    def has_others(self) -> bool:
        """Return whether there are other ranks."""
        return self._ranks > 1

    def run(self, step: Step) -> list[int]:
        """Compute a step in all stages, in rank 0; return the next token of each row, if they are needed."""
        result = self._stage.compute(step, None)
        if not self.has_others:
            return result if isinstance(result, list) else []
        self._send_numbers(_STEP, step)
        self._send_states(result)
        if not step.samples:
            return []
        tokens = torch.zeros(len(step.rows), dtype=torch.long)
        dist.recv(tokens, src=self._ranks - 1)
        return [int(token) for token in tokens]

    def send_heartbeat(self) -> None:
        """Let the other ranks know that rank 0 waits for requests."""
        if self.has_others:
            self._send_numbers(_NOTHING)

    def stop(self) -> None:
        """End the other ranks."""
        if self.has_others:
            self._send_numbers(_STOP)

    def follow(self) -> None:
        """Compute this rank's part of all steps, until rank 0 stops. In all ranks but 0."""
        is_last = self._rank == self._ranks - 1
        while True:
            numbers = torch.zeros(self._numbers, dtype=torch.long)
            dist.recv(numbers, src=self._rank - 1)
            kind, packed = int(numbers[0]), numbers[1:].tolist()
            if kind != _STEP:
                if not is_last:
                    dist.send(numbers, dst=self._rank + 1)
                if kind == _STOP:
                    return
                continue
            step = steps.unpack(packed)
            size, dtype = self._stage.hidden_shape
            hidden = torch.zeros(len(step.rows), step.width, size, dtype=dtype, device=self._device)
            dist.recv(hidden, src=self._rank - 1)
            result = self._stage.compute(step, hidden)
            if not is_last:
                dist.send(numbers, dst=self._rank + 1)
                self._send_states(result)
            elif isinstance(result, list):
                dist.send(torch.tensor(result, dtype=torch.long), dst=0)

    def _send_numbers(self, kind: int, step: Step | None = None) -> None:
        packed = [kind, *(step.pack() if step is not None else ())]
        numbers = torch.tensor(packed + [0] * (self._numbers - len(packed)), dtype=torch.long)
        dist.send(numbers, dst=self._rank + 1)

    def _send_states(self, states: object) -> None:
        assert isinstance(states, torch.Tensor)  # noqa: S101 - for the type checker: no stage before the last one samples
        dist.send(states.contiguous(), dst=self._rank + 1)
