"""The time that one request takes of the event loop, which serves everybody, at the most that one user may create.

Processor time of the loop's thread is measured, not time on a clock: what else runs on the machine does not count.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from gpuhub.broker.app import PREFIX
from gpuhub.config.settings import UserSettings
from tests.support.broker.calls import post
from tests.support.broker.full_queue import DEAR_JOB, full_queue
from tests.support.broker.in_process import Setting, asgi_broker
from tests.support.docker.simulated_nodes import build_cluster

#: Longest single step, during which nothing else is served, and all steps of one request; seconds of processor time.
MAX_STEP_S, MAX_REQUEST_S = 0.1, 0.2
#: Longest transaction, of the largest array; seconds of processor time.
MAX_TRANSACTION_S = 0.5


@dataclass(slots=True)
class LoopTime:
    """Processor time of the event loop, seconds."""

    longest_step_s: float = 0.0
    total_s: float = 0.0


@contextmanager
def measured_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopTime]:
    """Measure every callback of the event loop."""
    found = LoopTime()
    run = asyncio.Handle._run

    def run_measured(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        step_s = time.thread_time() - began
        found.total_s += step_s
        found.longest_step_s = max(found.longest_step_s, step_s)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", run_measured)
        yield found


async def measure(monkeypatch: pytest.MonkeyPatch, request: Any) -> tuple[httpx.Response, LoopTime]:
    """Send a request in a task of its own, since the test's own step would not be counted as a whole."""
    with measured_loop(monkeypatch) as found:
        answer = await asyncio.create_task(request)
    # The step that ends the request also runs what follows here, up to this point.
    await asyncio.sleep(0)
    return answer, found


@contextmanager
def kept_memory() -> Iterator[None]:
    """Leave out of the garbage collections within steps what this test and others have in memory."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def list_queries(route: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the queries of a route that may be dear: none, each switch on, and each number at its most.

    Streams send their first view.
    """
    names = {parameter["name"] for parameter in route.get("parameters", ())}
    base = {"for_s": "0"} if "for_s" in names else {}
    yield base
    for parameter in route.get("parameters", ()):
        schema = parameter["schema"]
        if parameter["in"] == "query" and schema.get("type") == "boolean":
            yield base | {parameter["name"]: "true"}
        elif parameter["in"] == "query" and schema.get("type") == "integer" and schema.get("maximum", 2**63) < 2**31:
            yield base | {parameter["name"]: str(schema["maximum"])}


async def test_no_get_request_holds_up_the_loop(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dearest request of every GET route stays below the limits, asked twice; so others are served in between."""
    async with full_queue(setting) as (running, jobs), running.client("ada") as client:
        assert len(jobs) == 1000
        ids = {
            "lease_id": jobs[-1]["lease"]["id"],
            "job_id": jobs[-1]["id"],
            "notebook_id": "nb-0a1b2c",
            "name": "rig1",
        }
        routes = {
            path.removeprefix(PREFIX): methods["get"]
            for path, methods in running.app.openapi()["paths"].items()
            if "get" in methods
        }
        assert {"/health", "/api/v1/jobs", "/api/v1/leases/{lease_id}/why"} <= routes.keys()
        found = {}
        asked = [
            (path, query, turn) for path, route in routes.items() for query in list_queries(route) for turn in (1, 2)
        ]
        with kept_memory():
            for path, query, turn in asked:
                answer, took = await measure(monkeypatch, client.get(path.format(**ids), params=query))
                assert answer.status_code < 500, answer.text
                found[path, *query.items(), turn] = took
        slow = {
            key: took for key, took in found.items() if took.longest_step_s > MAX_STEP_S or took.total_s > MAX_REQUEST_S
        }
        assert not slow


async def test_a_caller_asks_for_one_explanation_at_a_time(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of explanations asked for at once each is computed once; what others ask is answered between its steps."""
    async with full_queue(setting) as (running, jobs), running.client("ada") as ada, running.client("ben") as ben:
        scheduler = running.core.scheduler
        explained: list[str] = []
        explain = type(scheduler).explain_pending

        def count_explained(self: Any, request_id: str, now: float) -> Any:
            explained.append(request_id)
            return explain(self, request_id, now)

        monkeypatch.setattr(type(scheduler), "explain_pending", count_explained)
        path = f"/api/v1/leases/{jobs[-1]['lease']['id']}/why"
        whys = [asyncio.create_task(ada.get(path)) for _ in range(12)]
        answered = 0
        while not all(task.done() for task in whys):
            answered += (await asyncio.create_task(ben.get("/health"))).status_code == 200
        assert {task.result().status_code for task in whys} == {200}
        # Once for the first, and once for those that asked while that was computed.
        assert explained.count(jobs[-1]["lease"]["id"]) <= 2
        assert answered >= 10
        answers = await asyncio.gather(*(ada.get(path) for _ in range(40)))
        refused = [answer.json() for answer in answers if answer.status_code == 429]
        assert {one["code"] for one in refused} == {"too-many-streams"}
        assert refused[0]["detail"].startswith("ada: 16 explanations being computed at once are the limit")


async def test_a_large_array_does_not_hold_up_the_loop(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest array that may be asked for is entered in one bounded step, and answered in short ones."""
    setting.cluster = build_cluster(users=UserSettings(allowed=("ada",)))
    async with asgi_broker(setting) as running, running.client("ada") as client:
        body = {"job": {"run_id": "run-000001", **DEAR_JOB}, "count": 1000}
        with kept_memory():
            answer, took = await measure(monkeypatch, client.post("/api/v1/jobs/arrays", json=body))
        assert answer.status_code == 201
        assert len(answer.json()) == 1000
        # One transaction enters all of them, so it is one step.
        assert took.longest_step_s < MAX_TRANSACTION_S
        await post(running, "ada", "/jobs", {"run_id": "run-000002"}, 429)
