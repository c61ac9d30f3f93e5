"""Runs' ids for the shell's completion: quick, remembered for a moment, and never a word of trouble."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from gpu_launch import runs
from gpu_launch.cli import hubs
from gpu_launch.cli.connection import build_broker
from gpu_launch.cli.finding import newest_first
from gpu_launch.cli.views import state_of
from gpu_launch.errors import GpuLaunchError

_GOOD_FOR_S = 10.0
#: A hub that does not answer at once is not waited for.
_PATIENCE_S = 0.0


def complete_run(context: click.Context, _: click.Parameter, begun: str) -> list[CompletionItem]:
    """The runs that begin so, newest first."""
    hub_url = context.find_root().params.get("hub")
    try:
        found = _remembered(hubs.choose(hub_url))
    except (GpuLaunchError, OSError, ValueError):
        return []
    return [CompletionItem(run, help=text) for run, text in found if run.startswith(begun)]


def _remembered(hub: hubs.Hub) -> list[tuple[str, str]]:
    key = hashlib.sha256(f"{hub.broker_url} {hub.token}".encode()).hexdigest()[:16]
    path = hubs.config_file().parent / f"runs-{key}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        if 0 <= time.time() - path.stat().st_mtime < _GOOD_FOR_S:
            return [(str(run), str(text)) for run, text in json.loads(path.read_text())]
    jobs = newest_first(build_broker(hub, patience_s=_PATIENCE_S).jobs(ended=True))
    found = [(job.run_id, f"{job.name} {state_of(job)}".strip()) for job in jobs if job.detached]
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _forget_others(path)
        runs.write_secret(path, found)
    return found


def _forget_others(path: Path) -> None:
    """Of earlier tokens nothing stays."""
    for old in path.parent.glob("runs-*.json"):
        if old != path and time.time() - old.stat().st_mtime > _GOOD_FOR_S:
            old.unlink(missing_ok=True)
