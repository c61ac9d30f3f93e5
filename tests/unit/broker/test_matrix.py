"""Who may do what: every route of the API with every kind of caller, as data."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuhub import names
from gpuhub.broker import file_routes, routes
from gpuhub.settings import Profile
from tests.support.brokers import ACCESS, API, Running, Setting, asgi_broker
from tests.support.simulated import build_cluster
from tests.unit.broker.test_api import ask, post

#: No token, one that the hub never knew, one that expired or was revoked, one that does not reach the broker; a service
#: that may look only; another user, another one who is in a group; the owner of everything; the hub's spawner; an
#: administrator; root on the head node with the broker's own token.
CALLERS = ("none", "unknown", "revoked", "narrow", "reader", "ben", "member", "ada", "spawner", "root", "own-token")
STRANGERS = (401, 401, 401, 403)

LEASE = {"profile": "cpu"}
EMPTY_TAR = bytes(10240)
CONTAINER = "c" * 12
JOB = {"server": "other"}
WINDOW = {"starts_at": "2126-01-01T08:00:00Z", "ends_at": "2126-01-01T09:00:00Z"}


@dataclass(frozen=True)
class Row:
    """What a route answers to the callers after the strangers, in their order. `body` may be made for each call."""

    statuses: tuple[int, ...]
    body: Any = None


def everybody(status: int, body: Any = None) -> Row:
    return Row((status,) * 7, body)


def owners(status: int, body: Any = None) -> Row:
    """Only those who see it find it: its owner, who acts for every owner, and administrators."""
    return Row((404, 404, 404, status, status, status, status), body)


def administrators(status: int, body: Any = None) -> Row:
    return Row((403, 403, 403, 403, 403, status, status), body)


#: {lease} is active, {waiting} waits, {job} has its GPU, {reservation} is ahead: all of ada's, the last one root's.
MATRIX: dict[str, Row] = {
    "GET /cluster": everybody(200),
    "GET /nodes": everybody(200),
    "GET /reservations": everybody(200),
    "GET /events": everybody(200),
    "GET /usage": everybody(200),
    "GET /usage?owner=ada": Row((403, 403, 403, 200, 200, 200, 200)),
    "GET /leases": everybody(200),
    "GET /jobs": everybody(200),
    "POST /leases": Row((422, 201, 201, 201, 422, 201, 422), LEASE),
    "POST /leases as ada": Row((403, 403, 403, 201, 201, 403, 403), {**LEASE, "owner": "ada"}),
    "POST /leases with groups": Row((422, 403, 403, 403, 422, 403, 422), {**LEASE, "groups": ["lab"]}),
    "GET /leases/{lease}": owners(200),
    "GET /leases/{waiting}/why": owners(200),
    "POST /leases/{lease}/activate": owners(200, {"container_id": CONTAINER}),
    "POST /leases/{lease}/extend": owners(200, {"time_limit_s": 3600}),
    "POST /leases/{lease}/force": administrators(409),
    "DELETE /leases/{waiting}": owners(200),
    "POST /jobs": Row((403, 201, 201, 201, 403, 201, 403), JOB),
    "POST /jobs/arrays": Row((403, 201, 201, 201, 403, 201, 403), {"job": JOB, "count": 2}),
    "GET /jobs/{job}": owners(200),
    "POST /jobs/{job}/renew": owners(204),
    "DELETE /jobs/{job}": owners(200),
    "GET /jobs?ended=true": everybody(200),
    # Files, logs and states are for their owners alone: administrators and services see that a job is there, no more.
    "PUT /files?path=work": Row((403, 200, 200, 200, 403, 200, 403), EMPTY_TAR),
    "GET /files?path=.": Row((403, 200, 200, 200, 403, 200, 403)),
    "GET /jobs/{job}/logs": Row((404, 404, 404, 200, 403, 403, 403)),
    "GET /jobs/{job}/state": Row((404, 404, 404, 404, 403, 403, 403)),
    "POST /nodes/rig3/cordon": administrators(200, {"reason": "new fans"}),
    "POST /nodes/rig3/drain": administrators(200, {"grace_s": 60}),
    "POST /nodes/rig3/undrain": administrators(200),
    "POST /reservations": administrators(201, {"name": "course", "users": ["ben"], **WINDOW}),
    "DELETE /reservations/{reservation}": administrators(204),
}


@pytest.fixture
def guarded(tmp_path: Path) -> Setting:
    """Ada's card has a time limit; the hub knows all callers."""
    profiles = [
        Profile(name="rtx5090", title="RTX 5090", gpu_model="RTX 5090", time_limit="8h"),
        Profile(name="cpu", title="No GPU", gpu_count=0),
    ]
    setting = Setting(tmp_path, cluster=build_cluster(profiles=profiles))
    setting.hub.models |= {
        "revoked": None,
        "reader": {"kind": "service", "name": "reader", "scopes": [ACCESS]},
        "member": {"kind": "user", "name": "mia", "admin": False, "groups": ["lab"], "scopes": [ACCESS]},
    }
    return setting


_numbers = itertools.count(1)


async def build_world(running: Running) -> dict[str, str]:
    """What the routes' names stand for; what an earlier call ended is made anew."""
    lease = await ask(running, "ada", profile="rtx5090")
    if lease["state"] == "granted":
        run_container(running, lease)
        lease = await post(running, "ada", f"/leases/{lease['id']}/activate", {"container_id": CONTAINER})
    waiting = await ask(running, "ada", profile="rtx5090", server="second")
    job = await post(running, "ada", "/jobs", {"run_id": f"run-{next(_numbers):06}", "detached": True}, 201)
    day = f"{2100 + next(_numbers)}-01-01T"
    window = {"starts_at": f"{day}08:00:00Z", "ends_at": f"{day}09:00:00Z"}
    reserved = {"name": "kept", "nodes": ["rig2"], "users": ["ada"], **window}
    reservation = await post(running, "root", "/reservations", reserved, 201)
    return {name: made["id"] for name, made in zip(NAMES, (lease, waiting, job, reservation), strict=True)}


def run_container(running: Running, lease: dict[str, Any]) -> None:
    """The lease's container, without which it would end at the next look."""
    node = running.setting.nodes[lease["nodes"][0]]
    labels = {names.LABEL_KIND: "notebook", names.LABEL_LEASE: lease["id"], names.LABEL_EPOCH: str(lease["epoch"])}
    made = node.containers.pop(node.run_container(labels, name=lease["id"]))
    node.containers[CONTAINER] = {**made, "Id": CONTAINER}


NAMES = ("lease", "waiting", "job", "reservation")


def make_body(route: str, body: Any) -> Any:
    """Keys and run ids are another one's each time; so are reserved GPUs."""
    number = next(_numbers)
    if route.startswith("POST /leases") and "profile" in (body or {}):
        return {**body, "key": f"m{number}", "server": f"s{number}"}
    if route == "POST /jobs":
        return {**body, "run_id": f"run-m{number:06}"}
    if route == "POST /jobs/arrays":
        return {**body, "job": {**body["job"], "run_id": f"run-m{number:06}"}}
    if route == "POST /reservations":
        return {**body, "gpus": [f"GPU-rig{1 + number % 3}-0"], "starts_at": f"{2300 + number}-01-01T08:00:00Z",
                "ends_at": f"{2300 + number}-01-01T09:00:00Z"}  # fmt: skip
    return body


async def call(running: Running, route: str, caller: str, body: Any) -> Any:
    method, path = route.split()[:2]
    async with running.client(None if caller == "none" else caller) as client:
        path = path.format(**await build_world(running))
        return await client.request(method, f"/api/v1{path}", **make_content(route, body))


def make_content(route: str, body: Any) -> dict[str, Any]:
    """As httpx takes it."""
    return {"content": body} if isinstance(body, bytes) else {"json": make_body(route, body)}


@pytest.mark.parametrize("route", MATRIX)
async def test_every_route_for_every_caller(guarded: Setting, route: str) -> None:
    """The whole row of the matrix; whoever is refused gets a problem document with a code."""
    row, found = MATRIX[route], {}
    async with asgi_broker(guarded) as running:
        for caller in CALLERS:
            answer = await call(running, route, caller, row.body)
            found[caller] = answer.status_code
            if answer.status_code >= 400:
                assert answer.headers["Content-Type"] == "application/problem+json"
                assert answer.json()["detail"]
                assert answer.json()["code"]
                assert (answer.status_code == 401) == ("WWW-Authenticate" in answer.headers)
    assert found == dict(zip(CALLERS, STRANGERS + row.statuses, strict=True))


async def test_who_is_refused_changes_nothing(guarded: Setting) -> None:
    """After every refused call, leases, jobs, nodes and reservations are as they were."""
    watched = ("/leases", "/jobs", "/nodes", "/reservations")

    async def look(running: Running) -> list[Any]:
        async with running.client("root") as client:
            answers = [(await client.get(f"/api/v1{path}")).json() for path in watched]
        return [[_without_readings(one) for one in answer] for answer in answers]

    async with asgi_broker(guarded) as running:
        known = await build_world(running)
        await asyncio.sleep(0.3)  # the job's worker starts
        before = await look(running)
        for route, row in MATRIX.items():
            method, path = route.split()[:2]
            for caller, status in zip(CALLERS, STRANGERS + row.statuses, strict=True):
                if method == "GET" or status < 400:
                    continue
                async with running.client(None if caller == "none" else caller) as client:
                    path_of = f"/api/v1{path.format(**known)}"
                    await client.request(method, path_of, **make_content(route, row.body))
        assert await look(running) == before


def _without_readings(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in {"version", "waiting_for", "expected_start"}}


def test_every_route_of_the_api_is_in_the_matrix() -> None:
    """A route added later without a row here is noticed."""
    every = [*routes.api.routes, *file_routes.api.routes]
    there = {f"{method} {_name(route.path)}" for route in every for method in route.methods}
    assert there == {_name(row.split(" as ")[0].split(" with ")[0].split("?")[0].replace(API, "")) for row in MATRIX}


def _name(route: str) -> str:
    """The route with the same words for the same things."""
    for given, name in (
        ("{lease_id}", "{lease}"),
        ("{waiting}", "{lease}"),
        ("{job_id}", "{job}"),
        ("{reservation_id}", "{reservation}"),
        ("/nodes/{name}/", "/nodes/rig3/"),
        ("/api/v1", ""),
    ):
        route = route.replace(given, name)
    return route
