"""`[jobs]` in cluster.toml: limits and defaults of launches and detached jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from gpuhub.common.units import Size, Span, Span0
from gpuhub.config.base import Number, SettingsTable


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
    #: Folder on the head node with the lab's own recipes for `gpu-launch run recipe:NAME`, an absolute path; None for
    #: none. Its files run as whoever runs a recipe, so only who is trusted by all users may write there.
    recipes: Path | None = None

    @field_validator("recipes", mode="before")
    @classmethod
    def _recipes(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if not value.startswith("/") or ".." in value.split("/") or not value.isprintable():
            raise ValueError(f"{value!r}: the absolute path of a folder on the head node is needed")
        return Path(value)
