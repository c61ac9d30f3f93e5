"""The time that requests take of the event loop, which serves everybody, at the most that one user may create."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from gpuhub.broker.api.dependencies import PREFIX
from gpuhub.config.settings import UserSettings
from tests.support.broker.calls import post
from tests.support.broker.full_queue import DEAR_JOB, full_queue
from tests.support.broker.in_process import Setting, asgi_broker
from tests.support.docker.simulated_nodes import build_cluster
from tests.support.loop_time import MAX_STEP_S, LoopTime, kept_memory, measured_loop

#: All steps of one request, and one turn of the loop while one user sends hundreds; seconds of processor time.
MAX_REQUEST_S, MAX_TURN_S = 0.2, 0.5
#: Longest transaction, of the largest array; seconds of processor time.
MAX_TRANSACTION_S = 0.5


async def measure(monkeypatch: pytest.MonkeyPatch, request: Any) -> tuple[httpx.Response, LoopTime]:
    """Send a request in a task of its own, since the test's own step would not be counted as a whole."""
    with measured_loop(monkeypatch) as found:
        answer = await asyncio.create_task(request)
    # The step that ends the request also runs what follows here, up to this point.
    await asyncio.sleep(0)
    return answer, found


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
    """The dearest request of every GET route stays below the limits, asked twice; so others are served in between.

    Routes that refuse ada are asked as an administrator.
    """
    async with full_queue(setting) as (running, jobs), running.client("ada") as ada, running.client("root") as root:
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
                answer, took = await measure(monkeypatch, ada.get(path.format(**ids), params=query))
                if answer.status_code == 403:
                    answer, took = await measure(monkeypatch, root.get(path.format(**ids), params=query))
                    assert answer.status_code != 403, answer.text
                assert answer.status_code < 500, answer.text
                found[path, *query.items(), turn] = took
        slow = {
            key: took for key, took in found.items() if took.longest_step_s > MAX_STEP_S or took.total_s > MAX_REQUEST_S
        }
        assert not slow


def list_bodies(schemas: Mapping[str, Any], schema: Mapping[str, Any], size: int) -> Iterator[Any]:
    """Yield bodies in which each value is wrong, of about this size: unknown fields, and lists, also in objects within."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    yield {f"{number:06d}": 0 for number in range(size // 12)}
    for name, field in schema.get("properties", {}).items():
        if field.get("type") == "array":
            yield {name: [0] * (size // 3)}
        elif "$ref" in field and "properties" in schemas[field["$ref"].rpartition("/")[2]]:
            yield from ({name: inner} for inner in list_bodies(schemas, field, size - 100))


async def test_wrong_bodies_do_not_hold_up_the_loop(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of thousands of mistakes in one body are not all reported."""
    async with asgi_broker(setting) as running, running.client("root") as root:
        document = running.app.openapi()
        asked = []
        for path, methods in document["paths"].items():
            for method, route in methods.items():
                schema = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
                url = (
                    path.removeprefix(PREFIX).format(
                        lease_id="l", job_id="j", name="rig1", destination_id="d", viewer="ben", owner="ben"
                    )
                    if schema
                    else ""
                )
                for body in list_bodies(document["components"]["schemas"], schema, 1_000_000) if schema else ():
                    asked.append((method, url, json.dumps(body, separators=(",", ":")).encode()))
        assert len(asked) > 20
        slow = []
        with kept_memory():
            for method, url, content in asked:
                request = root.request(method, url, content=content, headers={"Content-Type": "application/json"})
                answer, took = await measure(monkeypatch, request)
                assert (answer.status_code, len(answer.text) < 1000) == (422, True), answer.text
                if took.longest_step_s > MAX_STEP_S:
                    slow.append((method, url, content[:40], took.longest_step_s))
        assert not slow


async def test_many_lists_at_once_leave_the_loop_to_others(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hundreds of lists that one user asks for at once some are rendered, one after the other."""
    async with full_queue(setting) as (running, _), running.client("ada") as ada, running.client("ben") as ben:
        replay = {"job": {"run_id": "run-000000", "time_limit_s": 7200, **DEAR_JOB}, "count": 100}
        requests = [
            ada.build_request("GET", "/api/v1/jobs"),
            ada.build_request("GET", "/api/v1/jobs", params={"ended": "true"}),
            ada.build_request("GET", "/api/v1/leases"),
            ada.build_request("GET", "/api/v1/events", params={"limit": "1000"}),
            ada.build_request("POST", "/api/v1/jobs/arrays", json=replay),
        ]
        answers: list[httpx.Response] = []

        async def send(request: httpx.Request) -> None:
            answers.append(await ada.send(request))

        with kept_memory(), measured_loop(monkeypatch) as took:
            sent = [asyncio.create_task(send(request)) for _ in range(60) for request in requests]
            health_s = []
            while not all(task.done() for task in sent):
                began = time.thread_time()
                assert (await asyncio.create_task(ben.get("/health"))).status_code == 200
                health_s.append(time.thread_time() - began)
                await asyncio.sleep(0.01)
        assert Counter(answer.status_code // 100 for answer in answers) == {2: 32, 4: 268}
        refused = [answer.json() for answer in answers if answer.status_code == 429]
        assert refused[0]["detail"].startswith("ada: 32 lists being read at once are the limit")
        assert took.longest_turn_s < MAX_TURN_S
        assert max(health_s) < MAX_TURN_S


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
