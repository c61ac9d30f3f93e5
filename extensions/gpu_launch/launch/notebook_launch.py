"""The launches of this notebook, one at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from gpu_launch import environment
from gpu_launch.broker.client import BrokerClient
from gpu_launch.common.exchange import ExchangeFiles
from gpu_launch.errors import UsageError
from gpu_launch.launch.launch import Launch
from gpu_launch.launch.request import LaunchRequest, ValidatedRequest
from gpu_launch.launch.state import LaunchResult
from gpu_launch.launch.workers.worker_pool import worker_pools
from gpu_launch.options.launch_options import LaunchOptions

#: Held by the running launch of this notebook.
_running = threading.Lock()


def launch(
    options: LaunchOptions, *, cell: str | None = None, before: Mapping[str, str], exchange: ExchangeFiles | None = None
) -> LaunchResult:
    """Run one launch from this notebook. `before` is the environment when the notebook began.

    Raises:
        UsageError: before anything is asked for.
        LaunchFailed, LaunchInterrupted: after all ranks have ended.
    """
    if not _running.acquire(blocking=False):
        raise UsageError("Another launch of this notebook is running; one at a time.")
    try:
        validated, broker = prepare(options, cell=cell, before=before)
        pool = worker_pools.acquire(validated, broker)
        try:
            return Launch(validated, pool=pool, exchange=exchange, is_logged=True).run()
        finally:
            if pool.is_acquired:
                # An interrupt came before the launch could release it.
                worker_pools.release(pool, keep_s=0)
    finally:
        _running.release()


def prepare(
    options: LaunchOptions, *, cell: str | None, before: Mapping[str, str]
) -> tuple[ValidatedRequest, BrokerClient | None]:
    """Return the checked request of this notebook, and the broker; None where this server has none.

    Raises:
        UsageError: for a request that can never be met.
        BrokerError: when the broker cannot be reached.
    """
    env = environment.read()
    try:
        cwd = Path.cwd()
    except FileNotFoundError:
        raise UsageError("This notebook's folder does not exist any more; use %cd to go to another.") from None
    user_set = environment.find_changes(before, os.environ)
    broker = BrokerClient.for_notebook(env) if env.broker_url and env.token else None
    request = LaunchRequest(options=options, cell=cell, cwd=cwd, env=env, environ=user_set)
    return worker_pools.validate(request, broker), broker
