"""Finds jobs by what users type, and completes run ids."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from gpu_launch.broker.models import Job
from gpu_launch.cli.connection import credentials
from gpu_launch.cli.connection.http import build_broker
from gpu_launch.cli.tables import derive_state
from gpu_launch.common import run_folder
from gpu_launch.errors import GpuLaunchError, UsageError

_MAX_NAMED = 4
_CACHE_S = 10.0
#: Completion does not wait for a hub that restarts.
_RETRY_LIMIT_S = 0.0


def match_job(text: str, jobs: Sequence[Job]) -> Job:
    """Return the job with this id or name, or with a unique beginning of its id. `jobs` are newest first.

    Raises:
        UsageError: No job matches, or several do.
    """
    if (job := find_named_job(text, jobs)) is not None:
        return job
    matches = [job for job in jobs if _has_prefix(job.run_id, text)] if text else []
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(job.run_id for job in matches[:_MAX_NAMED])
        more = f" and {len(matches) - _MAX_NAMED} more" if len(matches) > _MAX_NAMED else ""
        raise UsageError(f"{text} is the beginning of several runs: {names}{more}.")
    raise UsageError(f"There is no job {text}. gpu-launch ps -a lists them.")


def find_named_job(text: str, jobs: Sequence[Job]) -> Job | None:
    """Return the job with this id, else the first one with this name; None if there is none."""
    by_id = next((job for job in jobs if text in (job.run_id, job.id)), None)
    return by_id or next((job for job in jobs if job.name == text), None)


def match_jobs(text: str, jobs: Sequence[Job]) -> list[Job]:
    """Return all tasks of an array that is named by its run id, or the end of it; else the one job."""
    tasks = [job for job in jobs if job.array is not None and text and text in (job.array, shorten_run_id(job.array))]
    return tasks or [match_job(text, jobs)]


def sort_newest_first(jobs: Sequence[Job]) -> list[Job]:
    """Sort by creation time, then by run id, newest first."""
    return sorted(
        jobs, key=lambda job: (job.created_at.timestamp() if job.created_at else 0.0, job.run_id), reverse=True
    )


def shorten_run_id(run_id: str) -> str:
    """Return the last part of a run id, which is nearly always unique."""
    return run_id.rpartition("-")[2]


def _has_prefix(run_id: str, text: str) -> bool:
    """Match `run-2026…`, `2026…`, or the last part alone: `3f2a`."""
    return any(part.startswith(text) for part in (run_id, run_id.removeprefix("run-"), shorten_run_id(run_id)))


def complete_run(context: click.Context, _: click.Parameter, prefix: str) -> list[CompletionItem]:
    """Return the run ids with this beginning, newest first."""
    hub_url = context.find_root().params.get("hub")
    try:
        runs = _list_cached_runs(credentials.choose_hub(hub_url))
    except (GpuLaunchError, OSError, ValueError):
        return []
    return [CompletionItem(run, help=text) for run, text in runs if run.startswith(prefix)]


def _list_cached_runs(hub: credentials.Hub) -> list[tuple[str, str]]:
    key = hashlib.sha256(f"{hub.broker_url} {hub.token}".encode()).hexdigest()[:16]
    path = credentials.get_config_file().parent / f"runs-{key}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        if 0 <= time.time() - path.stat().st_mtime < _CACHE_S:
            return [(str(run), str(text)) for run, text in json.loads(path.read_text(encoding="utf-8"))]
    jobs = sort_newest_first(build_broker(hub, retry_limit_s=_RETRY_LIMIT_S).list_jobs(ended=True))
    runs = [(job.run_id, f"{job.name} {derive_state(job)}".strip()) for job in jobs if job.detached]
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_other_caches(path)
        run_folder.write_secret_json(path, runs)
    return runs


def _remove_other_caches(path: Path) -> None:
    """Remove the caches of earlier tokens."""
    for cache in path.parent.glob("runs-*.json"):
        if cache != path and time.time() - cache.stat().st_mtime > _CACHE_S:
            cache.unlink(missing_ok=True)
