"""Profiles some steps of an unmodified script on one card, then writes the profile and ends the script.

A step is what lies between two updates of the script's first optimizer. Gradients are noted as they are computed, and
put into buckets as DDP does it. Compression is timed with torch's own hooks, on the gradients of the last step.
"""

from __future__ import annotations

import atexit
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gpu_launch import environment
from gpu_launch.common.import_hook import call_after_import
from gpu_launch.prediction import figures, report
from gpu_launch.prediction.figures import Bucket, Card, StepProfile
from gpu_launch.training import speed
from gpu_launch.training.comm_modes import PERIODS, CommMode
from gpu_launch.training.ddp_buckets import FIRST_BYTES, MOST_BYTES, choose_bucket_bytes
from gpu_launch.training.ddp_communication import build_powersgd_state

#: The variable with the name under which the prediction is kept; set in the rank that is profiled only.
VARIABLE = "GPU_LAUNCH_PREDICT"
#: Minimum number of measured steps.
_LEAST_STEPS = 5
#: Maximum number of measured steps.
_MOST_STEPS = 20
#: Time after which the profile ends with at least `_LEAST_STEPS`, seconds.
_LONGEST_S = 40.0
_COMPRESSIONS = 3


def install() -> None:
    """Profile this process's script for a prediction, if the environment says so.

    Raises:
        UsageError: there is no bench.
    """
    key = os.environ.get(VARIABLE, "")
    if not key:
        return
    home = environment.read().home
    bench = figures.read_bench(home)

    def publish(profile: StepProfile) -> None:
        report.publish(profile, bench, home=home, key=key)

    call_after_import("torch", lambda torch: StepProfiler(publish).install(torch))


@dataclass
class _Step:
    """One step's moments, see `_Clock`; gradients in the order in which they were computed."""

    begin: Any = None
    forward: Any = None
    gradients: list[tuple[Any, Any]] = field(default_factory=list)
    end: Any = None

    @property
    def is_complete(self) -> bool:
        return None not in (self.begin, self.forward, self.end) and bool(self.gradients)


class _Clock:
    """Moments on the host, or in the order of a GPU's current stream: taking them waits for nothing."""

    def __init__(self, device: Any) -> None:
        self._is_cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def span(self, begin: Any, end: Any) -> float:
        """Return the seconds between two moments."""
        if not self._is_cuda:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class StepProfiler:
    """Watches the steps of this process's first optimizer; calls a function with the profile, then ends the script."""

    def __init__(self, report_profile: Callable[[StepProfile], None]) -> None:
        self._report = report_profile
        self._optimizer: Any = None
        self._device: Any = None
        #: None before the first update, which shows the device.
        self._clock: _Clock | None = None
        self._began_s = 0.0
        self._seen = 0
        self._step = _Step()
        self._steps: list[_Step] = []
        self._is_done = False

    def install(self, torch: Any) -> None:
        """Watch optimizers and forward passes from now on."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        torch.nn.modules.module.register_module_forward_pre_hook(self._note_forward)
        register_optimizer_step_post_hook(self._end_step)
        atexit.register(self._warn_if_short)

    def _note_forward(self, _module: Any, _inputs: Any) -> None:
        if self._step.forward is None and self._clock is not None:
            self._step.forward = self._clock.mark()

    def _note_gradient(self, parameter: Any) -> None:
        if self._clock is not None:
            self._step.gradients.append((self._clock.mark(), parameter))

    def _end_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._optimizer is None:
            self._watch(optimizer)
        if optimizer is not self._optimizer or self._is_done or self._clock is None:
            return
        moment = self._clock.mark()
        self._step.end = moment
        self._seen += 1
        if self._seen <= speed.WARM_UP:
            self._began_s = time.monotonic()
        elif self._step.is_complete:
            self._steps.append(self._step)
        is_long = time.monotonic() - self._began_s > _LONGEST_S
        if len(self._steps) >= _MOST_STEPS or (is_long and len(self._steps) >= _LEAST_STEPS):
            self._is_done = True
            self._report(self._build(self._clock))
            raise SystemExit(0)
        self._step = _Step(begin=moment)

    def _watch(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        parameters = _list_parameters(optimizer)
        self._device = parameters[0].device
        self._clock = _Clock(self._device)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def _build(self, clock: _Clock) -> StepProfile:
        gradients = [parameter for _, parameter in self._steps[-1].gradients]
        groups = _divide(gradients)
        sizes, compress_s = _compress([[gradients[index].grad for index in group] for group in groups], self._device)

        def median(span: Callable[[_Step], float]) -> float:
            return statistics.median(map(span, self._steps))

        def ready(last: int) -> float:
            whole = [step for step in self._steps if len(step.gradients) > last]
            return statistics.median(clock.span(step.forward, step.gradients[last][0]) for step in whole)

        return StepProfile(
            script=Path(sys.argv[0]).name,
            card=describe_card(self._device),
            steps=len(self._steps),
            input_s=median(lambda step: clock.span(step.begin, step.forward)),
            compute_s=median(lambda step: clock.span(step.forward, step.gradients[-1][0])),
            update_s=median(lambda step: clock.span(step.gradients[-1][0], step.end)),
            buckets=tuple(
                Bucket(ready_s=ready(group[-1]), sizes=size) for group, size in zip(groups, sizes, strict=True)
            ),
            compress_s=compress_s,
            # Each once: with several backward passes in a step, it has several gradients.
            parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in set(gradients)),
            peak_memory_mib=read_peak_memory(self._device),
        )

    def _warn_if_short(self) -> None:
        if not self._is_done:
            sys.stderr.write(
                f"gpu_launch: no prediction: the script made {self._seen} steps of an optimizer of torch.optim, and "
                f"{_MOST_STEPS + speed.WARM_UP} are needed\n"
            )


def _list_parameters(optimizer: Any) -> list[Any]:
    groups = (group["params"] for group in optimizer.param_groups)
    return [parameter for group in groups for parameter in group if parameter.requires_grad]


def _divide(gradients: Sequence[Any]) -> list[list[int]]:
    """Return the indexes of the gradients in each bucket: DDP closes one when it has its size or more."""
    bytes_ = [gradient.numel() * gradient.element_size() for gradient in gradients]
    chosen = choose_bucket_bytes(sum(bytes_))
    groups: list[list[int]] = [[]]
    size, limit = 0, chosen or FIRST_BYTES
    for index, more in enumerate(bytes_):
        if size >= limit:
            groups.append([])
            size, limit = 0, chosen or MOST_BYTES
        groups[-1].append(index)
        size += more
    return groups


class _LocalBucket:
    """Gradients as torch's hooks get them from DDP."""

    def __init__(self, gradients: Sequence[Any]) -> None:
        import torch

        self._buffer = torch.cat([gradient.flatten() for gradient in gradients])
        parts = self._buffer.split([gradient.numel() for gradient in gradients])
        self._gradients = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]

    def buffer(self) -> Any:
        return self._buffer

    def gradients(self) -> list[Any]:
        return self._gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def _compress(buckets: Sequence[Sequence[Any]], device: Any) -> tuple[list[dict[CommMode, int]], dict[CommMode, float]]:
    """Return the bytes that each bucket has in each mode, and the time that compressing all of them takes."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([dist.get_rank()])
    sizes, seconds = [], {CommMode.BF16: 0.0, CommMode.POWERSGD: 0.0}
    for gradients in buckets:
        bucket = _LocalBucket(gradients)
        exact = bucket.buffer().numel() * bucket.buffer().element_size()
        seconds[CommMode.BF16] += _time(partial(bf16_compress_hook, group, bucket), device)
        state = build_powersgd_state(group, 2)
        state.iter = 2
        seconds[CommMode.POWERSGD] += _time(partial(powerSGD_hook, state, bucket), device)
        share = state.total_numel_after_compression / state.total_numel_before_compression
        sizes.append(
            {
                CommMode.EXACT: exact,
                CommMode.BF16: bucket.buffer().numel() * torch.bfloat16.itemsize,
                CommMode.POWERSGD: round(exact * share),
                **dict.fromkeys(PERIODS, 0),
            }
        )
    return sizes, seconds


def _time(call: Callable[[], Any], device: Any) -> float:
    """Return the shortest time of some calls after a first one, in seconds."""
    times = []
    for _ in range(1 + _COMPRESSIONS):
        span = speed.build_span(device)
        call().wait()
        span.mark()
        times.append(span.seconds())
    return min(times[1:])


def describe_card(device: Any, *, read_bytes_s: float = 0.0) -> Card:
    """Return the figures of a card, measured now."""
    import torch

    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    else:
        name, memory = "CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Card(
        node=environment.read().node,
        device=name,
        flops=speed.measure_speed(device),
        memory_mib=memory >> 20,
        read_bytes_s=read_bytes_s,
    )


def read_peak_memory(device: Any) -> int:
    """Return the most memory that this process has used on the device, in MiB."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device)) >> 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
