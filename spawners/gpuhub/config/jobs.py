"""`[jobs]` in cluster.toml: limits and defaults of launches and detached jobs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gpuhub.common.units import Size, Span, Span0
from gpuhub.config.base import (
    Number,
    SettingsTable,
)


class JobSettings(SettingsTable):
    """Limits of the worker containers of `%gpu_launch` and `gpu-launch`, and of their jobs."""

    #: CPU cores of a worker container; None for its GPUs' share of the node.
    cpus: Annotated[Number, Field(gt=0, le=1024)] | None = None
    #: Memory of a worker container, bytes; None for its GPUs' share of the node.
    memory: Size | None = None
    #: Size of /dev/shm in a worker container, bytes, which counts in `memory`; None for half of the memory.
    shm: Size | None = None
    #: Maximum number of processes and threads in a worker container.
    pids: Annotated[int, Field(ge=64, le=1_000_000)] = 4096
    #: Maximum data that a worker may write outside home, scratch and datasets, bytes; None for no limit. It needs XFS
    #: with project quotas, as a profile's `disk` does.
    disk: Size | None = None
    #: Size of /tmp and of /var/tmp in a worker, bytes, as a profile's `tmp`.
    tmp: Size | None = None
    #: Time limit of a job, seconds from its grant; None for no limit.
    time_limit: Span | None = None
    #: Time without a heartbeat from the notebook after which a launch ends and its GPUs are released, seconds.
    renew_within: Span = 25
    #: Time that idle workers stay with a notebook after a launch, so that the next one starts at once, seconds. They
    #: are released sooner when a request waits for GPUs. "0s": workers end with their launch.
    keep_workers: Span0 = 600
    #: Maximum size of one upload or download of `gpu-launch`, bytes.
    upload_limit: Size = 2 * 1024**3
    #: Time for which ended jobs are still listed, seconds.
    remember: Span = 14 * 86400
