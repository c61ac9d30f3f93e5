"""The size of DDP's gradient buckets, where ranks of several machines train together.

DDP sends a bucket as soon as its last gradient is there. Its buckets of 25 MiB suit fast links and large models: with
LoRA's few gradients one bucket has nearly all, which is ready when nothing is left to compute. Several smaller ones are
sent meanwhile. The gradients' mean is the same; the order of its additions, and so the last bit, may differ.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from gpu_launch.common.import_hook import call_after_import
from gpu_launch.training.ddp_communication import wrap_method

#: DDP's own sizes: of the first bucket, and of the others.
FIRST_BYTES, MOST_BYTES = 1 << 20, 25 << 20
#: Minimum size of a bucket, bytes: smaller ones cost more for their latency than they gain.
_LEAST_BYTES = 1 << 20
_PARTS = 8
_ARGUMENTS = ("bucket_cap_mb", "bucket_cap_mb_list")


def choose_bucket_bytes(gradient_bytes: int) -> int | None:
    """Return the size of buckets for that many bytes of gradients; None where DDP's own ones are right."""
    size = max(_LEAST_BYTES, gradient_bytes // _PARTS)
    return size if size < MOST_BYTES else None


def install() -> None:
    """Choose the buckets of this process's DDP models, when torch has been imported and if machines train together."""
    ranks, local_ranks = (int(os.environ.get(name) or 1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks > local_ranks:
        call_after_import(
            "torch", lambda torch: wrap_method(torch.nn.parallel.DistributedDataParallel, "__init__", _construct)
        )


def _construct(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Construct a model with buckets that suit it, unless the script says which ones."""
    try:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
    except TypeError:  # which DDP itself explains
        given = dict.fromkeys(_ARGUMENTS, True)
    if not any(given.get(name) for name in _ARGUMENTS):
        parameters = (parameter for parameter in given["module"].parameters() if parameter.requires_grad)
        size = choose_bucket_bytes(sum(parameter.numel() * parameter.element_size() for parameter in parameters))
        if size is not None:
            kwargs["bucket_cap_mb"] = size / (1 << 20)
    original(*args, **kwargs)
