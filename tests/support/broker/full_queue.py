"""A broker where one user has as much as the default limits allow, of the kind that costs it most."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import httpx

from gpuhub.broker.operations.operations import MAX_JOBS
from gpuhub.broker.state.output_shares import MAX_SHARES
from gpuhub.broker.state.transaction import Transaction
from gpuhub.config.settings import UserSettings
from gpuhub.domain import job_states
from gpuhub.domain.models import OutputShareRow
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
#: Events about ada, and shares of ada's and with ada.
EVENTS, SHARES = 2000, 2000


@asynccontextmanager
async def full_queue(setting: Setting) -> AsyncIterator[tuple[Running, list[dict[str, Any]]]]:
    """Yield a broker with ada's waiting jobs, ended jobs, events and shares, and these waiting jobs, the last one last."""
    setting.cluster = build_cluster(users=UserSettings(allowed=("ada", "ben")))
    async with asgi_broker(setting) as running, running.client("ada") as client:
        await _end_jobs(running, client)
        for number in range(EVENTS):
            running.core.add_event("job.note", f"event {number} of a job of ada's", owner="ada")
        running.core.shares._rows |= {(share.subject, share.viewer): share for share in _build_shares()}
        for number in count():
            job = {"run_id": f"run-{number:06}", "time_limit_s": 7200 + number, **DEAR_JOB}
            answer = await client.post("/api/v1/jobs/arrays", json={"job": job, "count": 100})
            if answer.status_code == 429:
                break
            assert answer.status_code == 201, answer.text
        yield running, await read(running, "ada", "/jobs")


async def _end_jobs(running: Running, client: httpx.AsyncClient) -> None:
    """Submit and end as many jobs as a list of ended ones has."""
    body = {"job": {"run_id": "ended-000001", **DEAR_JOB}, "count": MAX_JOBS}
    answer = await client.post("/api/v1/jobs/arrays", json=body)
    assert answer.status_code == 201, answer.text

    def end(draft: Transaction) -> None:
        for job in list(draft.jobs.values()):
            draft.put_job(job_states.cancel(job, "stopped", draft.now))

    await running.core.ledger.change(end)


def _build_shares() -> Iterator[OutputShareRow]:
    """Yield ada's shares, and those of others with ada."""
    for number in range(SHARES):
        owner, viewer = ("ada", "ben") if number < MAX_SHARES else (f"user{number // MAX_SHARES}", "ada")
        yield OutputShareRow(
            subject=f"job-{number}",
            viewer=viewer,
            owner=owner,
            run_id=f"run-{number:06}",
            name="training",
            created_at=0.0,
            expires_at=4e9,
        )
