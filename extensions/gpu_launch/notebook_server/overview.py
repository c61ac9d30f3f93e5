"""What JupyterLab shows of the cluster: the notebook, nodes, queue and own jobs, out of the broker's answers.

Fields are left out where JupyterLab does not show them, and missing ones of older brokers have a default.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

#: Ended jobs and waiting requests that are shown.
MAX_ENDED_JOBS = 20
MAX_QUEUE = 100
#: All open windows of JupyterLab share what was read in this time, seconds.
FRESH_S = 3.0

_JOB_FIELDS = ("id", "run_id", "name", "state", "reason", "created_at", "ended_at", "exit_code")
_GPU_FIELDS = ("model", "memory_mib", "state", "message", "share", "utilisation_percent", "memory_used_mib")


def build_overview(
    cluster: Mapping[str, Any], lease: Mapping[str, Any] | None, jobs: Iterable[Mapping[str, Any]], *, user: str
) -> dict[str, Any]:
    """Return the overview.

    Args:
        cluster: The broker's `ClusterView`.
        lease: The notebook's `LeaseView`; None if it has none.
        jobs: The `JobView` of each job, newest first. Those of other users, which administrators get, are left out.
        user: The notebook's owner.
    """
    gpus = {gpu["uuid"]: gpu for node in cluster["nodes"] for gpu in node["gpus"]}
    own = [_build_job(job) for job in jobs if job.get("owner") in (None, "", user)]
    ended = [job for job in own if job["state"] == "ended"][:MAX_ENDED_JOBS]
    return {
        "now": cluster.get("now"),
        "notebook": None if lease is None else _build_notebook(lease, gpus),
        "nodes": [
            {
                "name": node["name"],
                "state": node.get("state", ""),
                "message": node.get("message"),
                "gpus": [_build_gpu(gpu, user) for gpu in node["gpus"]],
            }
            for node in cluster["nodes"]
        ],
        "queue": [_build_entry(entry, user) for entry in cluster.get("queue", ())[:MAX_QUEUE]],
        "waiting": cluster.get("waiting", 0) + cluster.get("waiting_outside", 0),
        "jobs": [job for job in own if job["state"] != "ended"] + ended,
    }


def _build_notebook(lease: Mapping[str, Any], gpus: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the notebook with its GPUs and their last readings."""
    leased = []
    for gpu in lease.get("gpus", ()):
        share = gpu.get("share", 1)
        reading = gpus.get(gpu["uuid"], {})
        leased.append(
            {
                "model": gpu["model"],
                "node": gpu["node"],
                "share": share,
                "memory_mib": gpu.get("memory_cap_mib") or gpu.get("memory_mib", 0),
                # The reading of a shared GPU is of all its users together.
                "memory_used_mib": reading.get("memory_used_mib") if share == 1 else None,
                "utilisation_percent": reading.get("utilisation_percent") if share == 1 else None,
            }
        )
    fields = ("expires_at", "granted_at", "suspension", "may_suspend")
    return {"gpus": leased} | {name: lease.get(name) for name in fields}


def _build_gpu(gpu: Mapping[str, Any], user: str) -> dict[str, Any]:
    holders = gpu.get("holders") or [holder for holder in [gpu.get("holder")] if holder]
    return {name: gpu.get(name) for name in _GPU_FIELDS} | {
        "holders": [
            {
                "owner": holder["owner"],
                "purpose": holder.get("purpose", ""),
                "name": holder.get("name", ""),
                "until": holder.get("until"),
                "is_own": holder["owner"] == user and not holder.get("is_outside"),
            }
            for holder in holders
        ]
    }


def _build_entry(entry: Mapping[str, Any], user: str) -> dict[str, Any]:
    fields = ("position", "owner", "wants", "expected_start")
    return {name: entry.get(name) for name in fields} | {"is_own": entry.get("owner") == user}


def _build_job(job: Mapping[str, Any]) -> dict[str, Any]:
    lease = job.get("lease") or {}
    workers: Sequence[Mapping[str, Any]] = job.get("workers", ())
    return {name: job.get(name) for name in _JOB_FIELDS} | {
        "gpus": job.get("gpus") or job.get("nnodes", 1) * job.get("nproc_per_node", 1),
        "nodes": sorted({worker["node"] for worker in workers}),
        "position": lease.get("position"),
        "waiting_for": lease.get("waiting_for"),
        "expected_start": lease.get("expected_start"),
        "expires_at": lease.get("expires_at"),
    }


class SharedReader:
    """Reads a value in another thread: once for all who ask at the same time, and again when it is old."""

    def __init__(
        self, read: Callable[[], dict[str, Any]], executor: Executor, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._executor = executor
        self._clock = clock
        self._reading: asyncio.Future[dict[str, Any]] | None = None
        self._begun_at = 0.0

    async def get(self) -> dict[str, Any]:
        """Return the value; an error of the last reading is raised to all who waited for it."""
        if self._reading is None or (self._reading.done() and self._is_old(self._reading)):
            self._begun_at = self._clock()
            self._reading = asyncio.get_running_loop().run_in_executor(self._executor, self._read)
        # A caller that disconnects does not end the reading of the others.
        return await asyncio.shield(self._reading)

    def forget(self) -> None:
        """Make the next caller read again: the value was changed."""
        self._reading = None

    def _is_old(self, reading: asyncio.Future[dict[str, Any]]) -> bool:
        return reading.exception() is not None or self._clock() - self._begun_at > FRESH_S
