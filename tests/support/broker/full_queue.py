"""A broker where one user has as many waiting jobs as the default limits allow, of the kind that costs it most."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from gpuhub.config.settings import UserSettings
from tests.support.broker.calls import read
from tests.support.broker.in_process import Running, Setting, asgi_broker
from tests.support.docker.simulated_nodes import build_cluster

#: A job that asks for everything that can be asked for, so that its explanation has the most parts.
DEAR_JOB = {
    "models": ["RTX 5090", "RTX 5070"],
    "least_memory_mib": 1024,
    "least_driver": "500",
    "least_capability": "8.0",
    "exclude_nodes": ["rig3"],
    "exclusive": True,
    "batch": True,
}


@asynccontextmanager
async def full_queue(setting: Setting) -> AsyncIterator[tuple[Running, list[dict[str, Any]]]]:
    """Yield a broker with ada's jobs, and these jobs, the last one last."""
    setting.cluster = build_cluster(users=UserSettings(allowed=("ada", "ben")))
    async with asgi_broker(setting) as running, running.client("ada") as client:
        for number in count():
            job = {"run_id": f"run-{number:06}", "time_limit_s": 7200 + number, **DEAR_JOB}
            answer = await client.post("/api/v1/jobs/arrays", json={"job": job, "count": 100})
            if answer.status_code == 429:
                break
            assert answer.status_code == 201, answer.text
        yield running, await read(running, "ada", "/jobs")
