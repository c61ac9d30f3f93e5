"""The speed of this rank's device: a standard step before the training, and the compute times of its steps."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

#: Rows of the square matrices of the standard step: enough to fill a large GPU, and not too many for a CPU core.
_CUDA_ROWS, _CPU_ROWS = 4096, 512
_PRODUCTS, _ROUNDS = 4, 5
#: Steps at the start that are not counted: they compile, choose algorithms and allocate memory.
WARM_UP = 3
#: Minimum number of timed steps for a speed.
_FEWEST = 3
#: Number of last steps that count.
_LAST = 50


def measure_speed(device: Any) -> float:
    """Return this device's speed in float32 matrix products, in floating-point operations per second.

    It takes some tenths of a second. The fastest of several rounds counts, as anything else on the machine only delays.
    """
    import torch

    is_cuda = device.type == "cuda"
    rows = _CUDA_ROWS if is_cuda else _CPU_ROWS
    with torch.no_grad():
        left = torch.full((rows, rows), 1.0 / rows, device=device)
        right = torch.eye(rows, device=device)
        times = []
        for _ in range(1 + _ROUNDS):
            span = build_span(device)
            for _ in range(_PRODUCTS):
                right = left @ right
            span.mark()
            times.append(span.seconds())
    return _PRODUCTS * 2.0 * rows**3 / min(times[1:])


class HostSpan:
    """The time from its creation to the last mark, on the host's clock."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._end: float | None = None

    def mark(self) -> None:
        """Let the span end here, unless it is marked again."""
        self._end = time.perf_counter()

    def seconds(self) -> float:
        """Return the time to the last mark, 0 without one."""
        return 0.0 if self._end is None else self._end - self._start


class CudaSpan:
    """The time from its creation to the last mark, on the GPU's clock, in the order of the current stream."""

    def __init__(self) -> None:
        import torch

        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()
        self._is_marked = False

    def mark(self) -> None:
        self._end.record()
        self._is_marked = True

    def seconds(self) -> float:
        """Return the time to the last mark, 0 without one; wait until the GPU has reached it."""
        if not self._is_marked:
            return 0.0
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1000


def build_span(device: Any) -> HostSpan | CudaSpan:
    """Return a span that begins here, on the clock of this device."""
    return CudaSpan() if device.type == "cuda" else HostSpan()


class StepClock:
    """Samples per second of this rank's own computation, without waits for other ranks.

    With a model, a step's time ends when the last of its gradients has been computed. DistributedDataParallel waits for
    the other ranks after that moment: until then its all-reduces run next to the computation, on other threads or on
    another stream. Without a model, the time ends where the caller says so.
    """

    def __init__(self, device: Any, model: Any = None) -> None:
        self._device, self._has_model = device, model is not None
        self._span: HostSpan | CudaSpan | None = None
        self._samples = 0
        self._to_skip = WARM_UP
        self._spans: deque[tuple[int, HostSpan | CudaSpan]] = deque(maxlen=_LAST)
        if model is not None:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._mark)

    def start(self, samples: int) -> None:
        """Begin a step with this number of samples; 0 for one that is not timed."""
        self._keep()
        self._samples, self._span = samples, build_span(self._device)

    def end_body(self) -> None:
        """End the step's time here, if no model says when it ends."""
        if self._span is not None and not self._has_model:
            self._span.mark()

    def read_speed(self) -> float | None:
        """Return the median of the last steps' samples per second, and forget them; None after too few steps."""
        self._keep()
        timed = [(samples, span.seconds()) for samples, span in self._spans]
        speeds = [samples / seconds for samples, seconds in timed if seconds > 0]
        self._spans.clear()
        return statistics.median(speeds) if len(speeds) >= _FEWEST else None

    def _mark(self, _parameter: Any) -> None:
        if self._span is not None:
            self._span.mark()

    def _keep(self) -> None:
        """Keep the step that is over, unless it is one of the first or had no samples."""
        if self._span is not None:
            if self._to_skip:
                self._to_skip -= 1
            elif self._samples:
                self._spans.append((self._samples, self._span))
        self._span = None
